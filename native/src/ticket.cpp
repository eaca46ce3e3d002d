#include "forebay/ticket.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace forebay {
namespace {

std::int64_t now_ns() noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

}  // namespace

Ticket::Ticket(std::size_t pieces)
    : count_(pieces),
      piece_done_(std::make_unique<std::atomic<bool>[]>(pieces)),
      stamps_(std::make_unique<Stamps[]>(pieces)) {}

std::shared_ptr<Ticket> Ticket::completed() {
    auto ticket = std::make_shared<Ticket>(0);
    ticket->finish();
    return ticket;
}

bool Ticket::piece_done(std::size_t piece) const noexcept {
    return done() || (piece < count_ && piece_done_[piece].load(std::memory_order_acquire));
}

std::string Ticket::failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
}

bool Ticket::reached(Until until) const noexcept {
    return ended() || (until == Until::issued && pieces_issued() >= count_ && count_ > 0);
}

bool Ticket::wait_for(Until until, std::chrono::nanoseconds time) const {
    std::unique_lock lock(mutex_);
    // system_clock-free deadline; std::condition_variable blocks in the kernel, it does not spin.
    if (!changed_.wait_for(lock, time, [&] { return reached(until); })) {
        return false;
    }
    if (failed()) {
        throw std::runtime_error(failure_);
    }
    return true;
}

std::vector<double> Ticket::results() const {
    const std::lock_guard lock(mutex_);
    if (failed()) {
        throw std::runtime_error(failure_);
    }
    if (!ended()) {
        throw std::runtime_error("results asked for before the work has ended\nhint: call wait()");
    }
    return results_;
}

std::vector<PieceTimes> Ticket::times() const {
    std::vector<PieceTimes> times(count_);
    for (std::size_t piece = 0; piece < count_; ++piece) {
        const std::int64_t end = stamps_[piece].end.load(std::memory_order_relaxed);
        const std::int64_t begin = stamps_[piece].begin.load(std::memory_order_relaxed);
        times[piece] = {begin != 0 ? begin : end, end};
    }
    return times;
}

bool Ticket::hold_stream(Stream stream) const {
    std::vector<std::shared_ptr<Fence>> fences;
    {
        const std::lock_guard lock(mutex_);
        if (failed()) {
            throw std::runtime_error(failure_);
        }
        if (done()) {
            return true;
        }
        if (!has_fences_) {
            return false;
        }
        fences = last_fences_;
    }
    const auto holds = [&](const auto& fence) { return !fence || fence->hold(stream); };
    return !fences.empty() && std::all_of(fences.begin(), fences.end(), holds);
}

void Ticket::subscribe(const std::shared_ptr<Waker>& waker, Notice notice) {
    {
        const std::lock_guard lock(mutex_);
        if (!ended()) {
            subscriptions_.push_back({waker, notice});
            return;
        }
    }
    waker->wake();
}

void Ticket::mark_begun(std::size_t piece) noexcept {
    if (stamps_[piece].begin.load(std::memory_order_relaxed) == 0) {
        std::int64_t unset = 0;  // of several threads the first one counts
        stamps_[piece].begin.compare_exchange_strong(unset, now_ns(), std::memory_order_relaxed);
    }
}

void Ticket::mark_issued(std::shared_ptr<Fence> fence, std::size_t queue) {
    const std::lock_guard lock(mutex_);
    has_fences_ = has_fences_ && fence != nullptr;
    last_fences_.resize(std::max(last_fences_.size(), queue + 1));
    last_fences_[queue] = std::move(fence);
    if (issued_count_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
        changed_.notify_all();
    }
}

void Ticket::mark_done(std::size_t piece) {
    stamps_[piece].end.store(now_ns(), std::memory_order_relaxed);
    piece_done_[piece].store(true, std::memory_order_release);
    done_count_.fetch_add(1, std::memory_order_acq_rel);
    std::vector<std::shared_ptr<Waker>> wakers;
    {
        const std::lock_guard lock(mutex_);
        for (const auto& subscription : subscriptions_) {
            if (subscription.notice != Notice::every_piece) {
                continue;
            }
            if (auto waker = subscription.waker.lock()) {
                wakers.push_back(std::move(waker));
            }
        }
    }
    for (const auto& waker : wakers) {
        waker->wake();
    }
}

void Ticket::finish() { finish({}); }

void Ticket::finish(std::vector<double> results) {
    {
        const std::lock_guard lock(mutex_);
        results_ = std::move(results);
    }
    for (std::size_t piece = 0; piece < count_; ++piece) {
        if (stamps_[piece].end.load(std::memory_order_relaxed) == 0) {
            stamps_[piece].end.store(now_ns(), std::memory_order_relaxed);
        }
    }
    done_count_.store(count_, std::memory_order_release);
    issued_count_.store(count_, std::memory_order_release);
    end(State::done);
}

void Ticket::fail(std::string_view text) {
    {
        const std::lock_guard lock(mutex_);
        failure_ = text.empty() ? "failed without a reason" : text;
    }
    end(State::failed);
}

void Ticket::end(State state) {
    std::vector<Subscription> subscriptions;
    {
        const std::lock_guard lock(mutex_);
        state_.store(state, std::memory_order_release);
        last_fences_.clear();
        subscriptions.swap(subscriptions_);
        changed_.notify_all();
    }
    for (const auto& subscription : subscriptions) {
        if (const auto waker = subscription.waker.lock()) {
            waker->wake();
        }
    }
}

}  // namespace forebay
