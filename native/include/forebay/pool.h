// Pool: own worker threads for the host update. Work is a list of chunks; workers take the next
// chunk of the oldest ready work, with no barrier between pieces or between works. A pool without
// work sleeps in the kernel and costs nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "forebay/kernels.h"
#include "forebay/threads.h"
#include "forebay/ticket.h"
#include "forebay/types.h"
#include "forebay/update.h"

namespace forebay {

// What the pool executes: chunks that may run in any order and on any thread.
class Work {
public:
    virtual ~Work() = default;
    virtual std::size_t chunks() const noexcept = 0;
    // The ticket's piece that a chunk belongs to.
    virtual std::size_t piece_of(std::size_t chunk) const noexcept {
        static_cast<void>(chunk);
        return 0;
    }
    // Called once, when all predecessors are done and before any chunk.
    virtual void begin(Ticket& ticket) { static_cast<void>(ticket); }
    virtual void run(std::size_t chunk, Ticket& ticket) = 0;
    // Called once, after the last chunk; ends the ticket.
    virtual void end(Ticket& ticket) { ticket.finish(); }
};

enum class ChecksumAction { store, compare };

// A CRC-32C for every `block_bytes` of some bytes, the last block shorter.
struct ChecksumRequest {
    ChecksumAction action = ChecksumAction::store;
    Address address = 0;
    std::size_t bytes = 0;
    std::size_t block_bytes = 0;
    Address sums = 0;                // one uint32 a block: written, or what it must be
    std::vector<std::string> names;  // of what each block holds, for a difference's text
};

// The pool's shared part. Links and tickets may outlive the Pool that made it: after closing it
// refuses work, and nothing in it touches a thread.
class PoolQueue final : public Waker, public std::enable_shared_from_this<PoolQueue> {
public:
    explicit PoolQueue(const KernelTable& table) : table_(table) {}

    const KernelTable& table() const noexcept { return table_; }
    // Throws std::runtime_error when the queue is closed.
    void submit(TicketPtr ticket, std::unique_ptr<Work> work, std::vector<TicketPtr> after);
    TicketPtr fold(std::vector<FoldSpan> spans, DType source_dtype, bool first,
                   std::vector<TicketPtr> after, float scale = 1.0F);
    void wake() noexcept override;

    // For Pool alone.
    void work_until_closed();
    void close();
    void fail_what_is_left();

private:
    struct Job {
        TicketPtr ticket;
        std::unique_ptr<Work> work;
        std::vector<TicketPtr> after;
        std::size_t chunks = 0;
        std::size_t next = 0;  // guarded by the queue's mutex
        std::atomic<std::size_t> left{0};
        std::atomic<bool> broken{false};
    };
    using JobPtr = std::shared_ptr<Job>;

    void promote(std::unique_lock<std::mutex>& lock);
    static void run_chunk(Job& job, std::size_t chunk);
    static void break_job(Job& job, const char* text);
    static void end_job(Job& job);

    const KernelTable& table_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<JobPtr> ready_;     // predecessors done, chunks left to hand out
    std::vector<JobPtr> waiting_;  // predecessors not done
    std::vector<JobPtr> running_;  // handed out in part or whole, not ended
    bool predecessors_changed_ = false;
    bool closed_ = false;
};

class Pool {
public:
    // Binds worker i to cpus[i] where there is one for each, else every worker to all of them;
    // best effort, see pinning_error(). An empty list binds nothing.
    Pool(const KernelTable& table, std::size_t threads, const std::vector<int>& cpus);
    ~Pool() { close(); }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    std::size_t threads() const noexcept { return num_threads_; }
    const std::string& pinning_error() const noexcept { return pinning_error_; }
    const KernelTable& table() const noexcept { return queue_->table(); }
    const std::shared_ptr<PoolQueue>& queue() const noexcept { return queue_; }

    TicketPtr update(const PartState& part, UpdateRequest request, std::vector<TicketPtr> after);
    TicketPtr fold(std::vector<FoldSpan> spans, DType source_dtype, bool first,
                   std::vector<TicketPtr> after, float scale = 1.0F);
    TicketPtr square_sums(std::vector<ElementSpan> spans, DType dtype,
                          std::vector<TicketPtr> after);
    // A block that differs fails the ticket; its text names what the block holds.
    TicketPtr checksums(ChecksumRequest request, std::vector<TicketPtr> after);
    // Ends chunks that are being worked on, joins the workers and fails what is left. Idempotent.
    void close();

private:
    void check_process() const;

    std::shared_ptr<PoolQueue> queue_;
    std::size_t num_threads_;
    std::string pinning_error_;
    std::mutex closing_;
    std::vector<OwnThread> workers_;
};

}  // namespace forebay
