// The scripted file backend of the tests: real bytes, late, out of order, short or failed.
#include <algorithm>
#include <chrono>
#include <random>
#include <thread>
#include <utility>

#include "forebay/file_backend.h"

namespace forebay {
namespace {

class ScriptedBackend final : public FileBackend {
public:
    ScriptedBackend(FileBackendPtr inner, FileScript script)
        : inner_(std::move(inner)), script_(script), random_(script.seed) {}

    void submit(const FileBlock& block) override {
        const std::int64_t number = num_blocks_++;
        if (number == script_.fail_at) {
            ready_.push_back({block.tag, -std::int64_t{script_.fail_errno}});
            inner_->interrupt();
            return;
        }
        FileBlock given = block;
        if (number == script_.short_at) {
            given.bytes = std::min(given.bytes, script_.short_bytes);
        }
        if (given.bytes == 0) {
            ready_.push_back({block.tag, 0});
            inner_->interrupt();
            return;
        }
        ++num_inside_;
        inner_->submit(given);
    }

    void flush() override { inner_->flush(); }

    // Completions are kept back at random as long as others are under way, then shuffled.
    void wait(std::vector<FileCompletion>& completed) override {
        const std::size_t before = ready_.size();
        inner_->wait(ready_);
        num_inside_ -= std::min(num_inside_, ready_.size() - before);
        if (script_.max_delay_us == 0) {
            completed.insert(completed.end(), ready_.begin(), ready_.end());
            ready_.clear();
            return;
        }
        std::this_thread::sleep_for(
            std::chrono::microseconds(random_() % (script_.max_delay_us + 1)));
        std::shuffle(ready_.begin(), ready_.end(), random_);
        const std::size_t kept = num_inside_ > 0 ? random_() % (ready_.size() + 1) : 0;
        while (ready_.size() > kept) {
            completed.push_back(ready_.back());
            ready_.pop_back();
        }
    }

    void interrupt() noexcept override { inner_->interrupt(); }

private:
    const FileBackendPtr inner_;
    const FileScript script_;
    std::mt19937_64 random_;
    std::int64_t num_blocks_ = 0;
    std::size_t num_inside_ = 0;
    std::vector<FileCompletion> ready_;
};

}  // namespace

FileBackendPtr make_scripted_backend(FileBackendPtr inner, FileScript script) {
    return std::make_shared<ScriptedBackend>(std::move(inner), script);
}

}  // namespace forebay
