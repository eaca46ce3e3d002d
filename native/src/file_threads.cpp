// The file backend of threads: each does one block at a time with pread or pwrite.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "forebay/file_backend.h"
#include "forebay/threads.h"

namespace forebay {
namespace {

// What threads and backend share.
class Blocks {
public:
    void put(const FileBlock& block) {
        const std::lock_guard lock(mutex_);
        waiting_.push_back(block);
        work_.notify_one();
    }

    void take_completed(std::vector<FileCompletion>& completed) {
        std::unique_lock lock(mutex_);
        news_.wait(lock, [&] { return interrupted_ || !completed_.empty(); });
        interrupted_ = false;
        completed.insert(completed.end(), completed_.begin(), completed_.end());
        completed_.clear();
    }

    void interrupt() noexcept {
        const std::lock_guard lock(mutex_);
        interrupted_ = true;
        news_.notify_one();
    }

    void close() {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        work_.notify_all();
    }

    void work_until_closed() {
        std::unique_lock lock(mutex_);
        while (true) {
            work_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
            if (waiting_.empty()) {
                return;
            }
            const FileBlock block = waiting_.front();
            waiting_.pop_front();
            lock.unlock();
            const std::int64_t result = carry_out(block);
            lock.lock();
            completed_.push_back({block.tag, result});
            news_.notify_one();
        }
    }

private:
    static std::int64_t carry_out(const FileBlock& block) {
        void* address = reinterpret_cast<void*>(block.address);
        const auto offset = static_cast<off_t>(block.offset);
        const ssize_t count = block.action == FileAction::read
                                  ? ::pread(block.descriptor, address, block.bytes, offset)
                                  : ::pwrite(block.descriptor, address, block.bytes, offset);
        return count >= 0 ? static_cast<std::int64_t>(count) : -static_cast<std::int64_t>(errno);
    }

    std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable news_;
    std::deque<FileBlock> waiting_;
    std::vector<FileCompletion> completed_;
    bool interrupted_ = false;
    bool closed_ = false;
};

class ThreadBackend final : public FileBackend {
public:
    explicit ThreadBackend(std::size_t threads) : blocks_(std::make_shared<Blocks>()) {
        if (threads == 0) {
            throw std::invalid_argument("a thread backend needs at least 1 thread, not 0");
        }
        workers_.reserve(threads);
        try {
            for (std::size_t i = 0; i < threads; ++i) {
                workers_.emplace_back("forebay-file",
                                      [blocks = blocks_] { blocks->work_until_closed(); });
            }
        } catch (...) {
            blocks_->close();  // else joining those that did start would never end
            throw;
        }
    }

    ~ThreadBackend() override {
        if (!workers_.front().in_its_process()) {
            static_cast<void>(new std::shared_ptr<Blocks>(blocks_));  // see Pool::close
            return;
        }
        blocks_->close();
    }

    ThreadBackend(const ThreadBackend&) = delete;
    ThreadBackend& operator=(const ThreadBackend&) = delete;

    void submit(const FileBlock& block) override { blocks_->put(block); }
    void flush() override {}
    void wait(std::vector<FileCompletion>& completed) override {
        blocks_->take_completed(completed);
    }
    void interrupt() noexcept override { blocks_->interrupt(); }

private:
    std::shared_ptr<Blocks> blocks_;
    std::vector<OwnThread> workers_;
};

}  // namespace

FileBackendPtr make_thread_backend(std::size_t threads) {
    return std::make_shared<ThreadBackend>(threads);
}

}  // namespace forebay
