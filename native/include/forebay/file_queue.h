// FileQueue: reads and writes between host memory and files, done by one native thread that keeps
// a fixed number of blocks in flight and sees every completion. FileSet: one or several files as
// one striped space. Neither knows of training.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "forebay/file_backend.h"
#include "forebay/threads.h"
#include "forebay/ticket.h"
#include "forebay/types.h"

namespace forebay {

// Offsets, addresses and lengths are multiples of this: the sector of a 4Kn drive, which is what
// O_DIRECT asks for at most.
constexpr std::size_t kFileAlignment = 4096;

// Files that hold one space together: stripe i lies in file i % n. It has descriptors of its own,
// so the caller's may be closed.
class FileSet {
public:
    struct Place {
        std::size_t file = 0;
        std::uint64_t offset = 0;
        std::size_t bytes = 0;  // up to the end of the stripe
    };

    FileSet(const std::vector<int>& descriptors, std::vector<std::string> names,
            std::size_t stripe_bytes);
    ~FileSet();
    FileSet(const FileSet&) = delete;
    FileSet& operator=(const FileSet&) = delete;

    std::size_t files() const noexcept { return descriptors_.size(); }
    std::size_t stripe_bytes() const noexcept { return stripe_bytes_; }
    int descriptor(std::size_t file) const noexcept { return descriptors_[file]; }
    const std::string& name(std::size_t file) const noexcept { return names_[file]; }
    // Where the byte at `offset` lies; at most `bytes` from there on.
    Place place(std::uint64_t offset, std::size_t bytes) const noexcept;

private:
    std::vector<int> descriptors_;
    std::vector<std::string> names_;
    std::size_t stripe_bytes_;
};

using FileSetPtr = std::shared_ptr<const FileSet>;

// One piece of a transfer; 0 bytes are legal and done at once.
struct FileSpan {
    std::uint64_t offset = 0;
    Address address = 0;
    std::size_t bytes = 0;
};

// As LinkOrder: lowest priority number first, then age; the choice is made anew at every block.
struct FileOrder {
    int priority = 0;
    std::vector<TicketPtr> after;
    TicketPtr piecewise;  // piece i waits for its piece i; may be null
};

enum class Handover { batched, single };
enum class Refill { at_once, when_empty };

struct FileQueueOptions {
    std::size_t depth = 8;              // blocks in flight
    std::size_t block_bytes = 1 << 20;  // longest block
    Handover handover = Handover::batched;
    Refill refill = Refill::at_once;
    std::string name = "files";
};

struct FileCounters {
    std::uint64_t bytes_read = 0;
    std::uint64_t bytes_written = 0;
    std::uint64_t blocks = 0;
};

class FileLane;

class FileQueue {
public:
    FileQueue(FileBackendPtr backend, FileQueueOptions options);
    ~FileQueue() { close(); }
    FileQueue(const FileQueue&) = delete;
    FileQueue& operator=(const FileQueue&) = delete;

    // The ticket's piece i is done when all bytes of spans[i] are there. An error, or a file that
    // ends early, fails the ticket with action, bytes, offset, name and errno; short transfers go
    // on where they stopped.
    TicketPtr transfer(FileAction action, FileSetPtr files, std::vector<FileSpan> spans,
                       FileOrder order);
    // Blocks that are not under way are dropped and the ticket fails; nothing happens to one that
    // has ended or is not this queue's.
    void cancel(const TicketPtr& ticket);
    FileCounters counters() const noexcept;
    // Ends blocks in flight, joins the thread and fails what is left. Idempotent.
    void close();

private:
    void check_process() const;

    std::shared_ptr<FileLane> lane_;
    std::mutex closing_;
    std::unique_ptr<OwnThread> thread_;
};

}  // namespace forebay
