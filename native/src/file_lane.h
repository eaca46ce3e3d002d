// FileLane: the state machine that a FileQueue's thread runs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "forebay/file_queue.h"

namespace forebay {

struct FileJob {
    TicketPtr ticket;
    FileAction action = FileAction::read;
    FileSetPtr files;
    std::vector<FileSpan> spans;
    FileOrder order;
    std::uint64_t age = 0;
    std::size_t piece = 0;          // the next block's
    std::size_t position = 0;       // bytes of that piece that were issued
    std::vector<std::size_t> left;  // bytes of each piece that are not there yet
    std::size_t outstanding = 0;    // blocks in flight
    std::string failure;
};

class FileLane final : public Waker, public std::enable_shared_from_this<FileLane> {
public:
    FileLane(FileBackendPtr backend, FileQueueOptions options);

    // Throws std::runtime_error when the queue is closed.
    void submit(std::unique_ptr<FileJob> job);
    void cancel(const TicketPtr& ticket);
    void wake() noexcept override {
        news_.store(true, std::memory_order_release);
        backend_->interrupt();
    }
    void run();
    void close();
    FileCounters counters() const noexcept;
    const std::string& name() const noexcept { return options_.name; }

private:
    using JobPtr = std::shared_ptr<FileJob>;
    using Lock = std::unique_lock<std::mutex>;
    // A block in flight, by its tag; `job` is null where the place is free.
    struct Flight {
        JobPtr job;
        std::size_t piece = 0;
        std::size_t file = 0;
        FileBlock block;
        int stalls = 0;  // completions that brought nothing
    };

    void look_at_waiting();
    JobPtr choose();
    static bool may_go_on(const FileJob& job);
    void issue(const JobPtr& job);
    void issue_ready(Lock& lock);
    void complete(const FileCompletion& completion);
    void land(Flight& flight);
    void retry(Flight& flight, std::size_t bytes);
    std::string text_of(const Flight& flight, const std::string& reason) const;
    void end_jobs(Lock& lock);
    void fail_all(Lock& lock, const std::string& text);

    const FileBackendPtr backend_;
    const FileQueueOptions options_;
    std::mutex mutex_;
    bool closing_ = false;
    std::string broken_;  // why the backend cannot go on
    // A step of a large model enqueues tens of thousands of jobs at once, most of which wait for
    // others: they are looked at when something that they wait for has changed, not at every block.
    std::atomic<bool> news_{true};
    std::vector<JobPtr> waiting_;
    std::vector<JobPtr> jobs_;  // under way, or ready, or failed
    std::uint64_t num_jobs_ = 0;
    std::vector<Flight> flights_;
    std::vector<std::size_t> free_;  // places in flights_
    std::atomic<std::uint64_t> bytes_read_{0};
    std::atomic<std::uint64_t> bytes_written_{0};
    std::atomic<std::uint64_t> blocks_{0};
};

}  // namespace forebay
