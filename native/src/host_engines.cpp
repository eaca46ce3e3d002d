// Copy engines that need no driver: plain memory copies, and the scripted engine of the tests.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <utility>

#include "forebay/copy_engine.h"

namespace forebay {

std::shared_ptr<Fence> MemcpyEngine::submit(Stream stream, const std::vector<CopySpan>& spans) {
    static_cast<void>(stream);
    for (const CopySpan& span : spans) {
        if (span.bytes > 0) {
            std::memcpy(reinterpret_cast<void*>(span.destination),
                        reinterpret_cast<const void*>(span.source), span.bytes);
        }
    }
    return nullptr;
}

// A host "stream" is whatever thread works next, so there is never anything to wait for.
void MemcpyEngine::hold_stream(Stream stream, Event event) {
    static_cast<void>(stream);
    static_cast<void>(event);
}

bool MemcpyEngine::reached(Event event) {
    static_cast<void>(event);
    return true;
}

void MemcpyEngine::register_host(Address address, std::size_t bytes) {
    static_cast<void>(address);
    static_cast<void>(bytes);
}

void MemcpyEngine::unregister_host(Address address) { static_cast<void>(address); }

namespace {

class ScriptedFence final : public Fence {
public:
    void wait() override {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return ended_; });
        if (!failure_.empty()) {
            throw std::runtime_error(failure_);
        }
    }

    bool hold(Stream stream) override {
        static_cast<void>(stream);
        return false;
    }

    void end(const std::string& failure) {
        const std::lock_guard lock(mutex_);
        ended_ = true;
        failure_ = failure;
        changed_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool ended_ = false;
    std::string failure_;
};

}  // namespace

struct ScriptedEngine::Delayed {
    std::chrono::steady_clock::time_point due;
    Stream stream;
    std::vector<CopySpan> spans;
    bool fails;
    std::shared_ptr<ScriptedFence> fence;
};

class ScriptedEngine::Timer {
public:
    Timer(CopyEnginePtr inner, Script script)
        : inner_(std::move(inner)), script_(std::move(script)), random_(script_.seed) {
        if (script_.fail_text.empty()) {
            throw std::invalid_argument("a scripted failure needs a text");
        }
    }

    std::shared_ptr<Fence> add(Stream stream, const std::vector<CopySpan>& spans) {
        auto fence = std::make_shared<ScriptedFence>();
        const std::lock_guard lock(mutex_);
        const auto due = draw_due();
        const bool fails = script_.fail_at >= 0 && num_added_ == script_.fail_at;
        ++num_added_;
        pieces_.push_back({due, stream, spans, fails, fence});
        changed_.notify_all();
        return fence;
    }

    bool reached(Event event) {
        const std::lock_guard lock(mutex_);
        const auto found = events_.find(event);
        if (found == events_.end()) {
            events_.emplace(event, draw_due());
            return false;
        }
        if (found->second > std::chrono::steady_clock::now()) {
            return false;
        }
        events_.erase(found);  // its handle may be another event's from now on
        return true;
    }

    void close() {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        changed_.notify_all();
    }

    // Pieces still there at closing time are carried out at once: a lane waits for each of them.
    void run() {
        try {
            inner_->enter_lane();
        } catch (const std::exception& error) {
            broken_ = error.what();
        }
        std::unique_lock lock(mutex_);
        while (!closed_ || !pieces_.empty()) {
            if (pieces_.empty()) {
                changed_.wait(lock);
                continue;
            }
            const auto next =
                std::min_element(pieces_.begin(), pieces_.end(),
                                 [](const Delayed& a, const Delayed& b) { return a.due < b.due; });
            if (!closed_ && next->due > std::chrono::steady_clock::now()) {
                const auto due = next->due;
                changed_.wait_until(lock, due);
                continue;
            }
            const Delayed piece = std::move(*next);
            pieces_.erase(next);
            lock.unlock();
            carry_out(piece);
            lock.lock();
        }
    }

private:
    std::chrono::steady_clock::time_point draw_due() {
        const std::uint64_t delay_us = random_() % (script_.max_delay_us + 1);
        return std::chrono::steady_clock::now() + std::chrono::microseconds(delay_us);
    }

    void carry_out(const Delayed& piece) {
        std::string failure = piece.fails ? script_.fail_text : broken_;
        try {
            if (failure.empty()) {
                if (const auto end = inner_->submit(piece.stream, piece.spans)) {
                    end->wait();
                }
            }
        } catch (const std::exception& error) {
            failure = error.what();
        }
        piece.fence->end(failure);
    }

    CopyEnginePtr inner_;
    const Script script_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::mt19937_64 random_;
    std::int64_t num_added_ = 0;
    bool closed_ = false;
    std::vector<Delayed> pieces_;
    std::map<Event, std::chrono::steady_clock::time_point> events_;
    std::string broken_;  // the timer's thread alone uses it
};

ScriptedEngine::ScriptedEngine(CopyEnginePtr inner, Script script)
    : inner_(std::move(inner)), timer_(std::make_shared<Timer>(inner_, std::move(script))) {
    thread_ = std::make_unique<OwnThread>("forebay-script", [timer = timer_] { timer->run(); });
}

ScriptedEngine::~ScriptedEngine() {
    if (thread_->in_its_process()) {
        timer_->close();
    } else {
        static_cast<void>(new std::shared_ptr<Timer>(timer_));  // see Pool::close
    }
}

void ScriptedEngine::enter_lane() { inner_->enter_lane(); }

std::shared_ptr<Fence> ScriptedEngine::submit(Stream stream, const std::vector<CopySpan>& spans) {
    return timer_->add(stream, spans);
}

void ScriptedEngine::hold_stream(Stream stream, Event event) { inner_->hold_stream(stream, event); }

bool ScriptedEngine::reached(Event event) {
    return inner_->reached(event) && timer_->reached(event);
}

void ScriptedEngine::register_host(Address address, std::size_t bytes) {
    inner_->register_host(address, bytes);
}

void ScriptedEngine::unregister_host(Address address) { inner_->unregister_host(address); }

}  // namespace forebay
