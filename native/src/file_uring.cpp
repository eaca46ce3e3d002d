// The file backend over io_uring, by raw system calls: two rings shared with the kernel, one for
// blocks and one for completions. An eventfd that is polled through the same ring lets other
// threads interrupt a wait.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "forebay/file_backend.h"

#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#include <linux/io_uring.h>
#define FOREBAY_HAS_URING 1
#endif

namespace forebay {

#ifdef FOREBAY_HAS_URING
namespace {

constexpr std::uint64_t kInterruptTag = ~std::uint64_t{0};

[[noreturn]] void refuse(const char* call) {
    throw std::runtime_error(std::string("io_uring is not available: ") + call + ": " +
                             std::strerror(errno));
}

// A mapping of one of the rings.
class Mapping {
public:
    Mapping(int descriptor, std::size_t bytes, off_t what) : bytes_(bytes) {
        address_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                          descriptor, what);
        if (address_ == MAP_FAILED) {
            refuse("mmap");
        }
        // A forked child must not touch, nor keep, rings that its parent shares with the kernel.
        ::madvise(address_, bytes, MADV_DONTFORK);
    }
    ~Mapping() { ::munmap(address_, bytes_); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    template <typename T>
    T* at(std::size_t offset) const noexcept {
        return reinterpret_cast<T*>(static_cast<std::byte*>(address_) + offset);
    }

private:
    void* address_;
    std::size_t bytes_;
};

class Descriptor {
public:
    Descriptor(int value, const char* call) : value_(value) {
        if (value < 0) {
            refuse(call);
        }
    }
    ~Descriptor() { ::close(value_); }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int operator*() const noexcept { return value_; }

private:
    int value_;
};

unsigned load(unsigned* place) { return std::atomic_ref(*place).load(std::memory_order_acquire); }
void store(unsigned* place, unsigned value) {
    std::atomic_ref(*place).store(value, std::memory_order_release);
}

int setup(std::size_t depth, io_uring_params& params) {
    std::memset(&params, 0, sizeof(params));
    // one more place for the poll of the eventfd
    return static_cast<int>(
        ::syscall(__NR_io_uring_setup, static_cast<unsigned>(depth) + 1, &params));
}

class UringBackend final : public FileBackend {
public:
    explicit UringBackend(std::size_t depth)
        : ring_(setup(depth, params_), "io_uring_setup"),
          event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd"),
          submissions_(*ring_, params_.sq_off.array + params_.sq_entries * sizeof(unsigned),
                       IORING_OFF_SQ_RING),
          completions_(*ring_, params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe),
                       IORING_OFF_CQ_RING),
          entries_(*ring_, params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
        require_reads_and_writes();
        watch_event();
    }

    void submit(const FileBlock& block) override {
        io_uring_sqe& entry = next_entry();
        entry.opcode = block.action == FileAction::read ? IORING_OP_READ : IORING_OP_WRITE;
        entry.fd = block.descriptor;
        entry.addr = block.address;
        entry.len = static_cast<unsigned>(block.bytes);
        entry.off = block.offset;
        entry.user_data = block.tag;
    }

    void flush() override {
        while (held_back_ > 0) {
            enter(0, 0);
        }
    }

    void wait(std::vector<FileCompletion>& completed) override {
        const std::size_t before = completed.size();
        bool interrupted = false;
        while (completed.size() == before && !interrupted) {
            if (!has_completions() || held_back_ > 0) {
                enter(has_completions() ? 0 : 1, IORING_ENTER_GETEVENTS);
            }
            interrupted = reap(completed);
        }
        if (interrupted) {
            watch_event();
        }
    }

    void interrupt() noexcept override {
        const std::uint64_t one = 1;
        // A full counter has woken the waiter already.
        static_cast<void>(!::write(*event_, &one, sizeof(one)));
    }

private:
    io_uring_sqe& next_entry() {
        const unsigned mask = *submissions_.at<unsigned>(params_.sq_off.ring_mask);
        const unsigned place = (tail_ + held_back_) & mask;
        io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[place];
        std::memset(&entry, 0, sizeof(entry));
        submissions_.at<unsigned>(params_.sq_off.array)[place] = place;
        ++held_back_;
        return entry;
    }

    void watch_event() {
        std::uint64_t count = 0;
        static_cast<void>(!::read(*event_, &count, sizeof(count)));
        io_uring_sqe& entry = next_entry();
        entry.opcode = IORING_OP_POLL_ADD;
        entry.fd = *event_;
        entry.poll_events = POLLIN;
        entry.user_data = kInterruptTag;
    }

    void enter(unsigned at_least, unsigned flags) {
        store(submissions_.at<unsigned>(params_.sq_off.tail), tail_ + held_back_);
        const long taken = ::syscall(__NR_io_uring_enter, *ring_, held_back_, at_least, flags,
                                     nullptr, std::size_t{0});
        if (taken >= 0) {
            tail_ += static_cast<unsigned>(taken);
            held_back_ -= static_cast<unsigned>(taken);
        } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
            throw std::runtime_error("io_uring_enter: " + std::string(std::strerror(errno)));
        }
    }

    bool has_completions() const {
        return load(completions_.at<unsigned>(params_.cq_off.head)) !=
               load(completions_.at<unsigned>(params_.cq_off.tail));
    }

    // True when the interrupt was among them.
    bool reap(std::vector<FileCompletion>& completed) {
        unsigned* head_place = completions_.at<unsigned>(params_.cq_off.head);
        const unsigned tail = load(completions_.at<unsigned>(params_.cq_off.tail));
        const unsigned mask = *completions_.at<unsigned>(params_.cq_off.ring_mask);
        const auto* entries = completions_.at<io_uring_cqe>(params_.cq_off.cqes);
        bool interrupted = false;
        unsigned head = load(head_place);
        for (; head != tail; ++head) {
            const io_uring_cqe& entry = entries[head & mask];
            if (entry.user_data == kInterruptTag) {
                interrupted = true;
            } else {
                completed.push_back({entry.user_data, entry.res});
            }
        }
        store(head_place, head);
        return interrupted;
    }

    // Linux 5.6 and later; asked for, so that an older kernel is refused here and not at a block.
    void require_reads_and_writes() const {
        constexpr unsigned count = 64;
        alignas(io_uring_probe)
            std::byte memory[sizeof(io_uring_probe) + count * sizeof(io_uring_probe_op)] = {};
        auto* probe = reinterpret_cast<io_uring_probe*>(memory);
        if (::syscall(__NR_io_uring_register, *ring_, IORING_REGISTER_PROBE, probe, count) < 0) {
            refuse("io_uring_register");
        }
        if (probe->last_op < IORING_OP_WRITE) {
            throw std::runtime_error("io_uring is not available: this kernel's is too old");
        }
    }

    io_uring_params params_;
    Descriptor ring_;
    Descriptor event_;
    Mapping submissions_;
    Mapping completions_;
    Mapping entries_;
    unsigned tail_ = 0;       // of the submissions that the kernel has taken
    unsigned held_back_ = 0;  // behind it
};

}  // namespace

FileBackendPtr make_uring_backend(std::size_t depth) {
    return std::make_shared<UringBackend>(depth);
}

#else

FileBackendPtr make_uring_backend(std::size_t depth) {
    static_cast<void>(depth);
    throw std::runtime_error("io_uring is not available: not known where this core was built");
}

#endif

}  // namespace forebay
