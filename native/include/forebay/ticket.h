// Ticket: what every piece of asynchronous work returns. It counts pieces, ends once (done or
// failed) and wakes whoever waits. It is not a queue and runs no callbacks of the caller's.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "forebay/types.h"

namespace forebay {

// A queue that wants to look again when something that it waits for has changed.
class Waker {
public:
    virtual ~Waker() = default;
    // Called from any thread, without any of the ticket's locks held.
    virtual void wake() noexcept = 0;
};

// A point in an accelerator's stream: the end of one piece.
class Fence {
public:
    virtual ~Fence() = default;
    // Blocks the calling thread, without spinning, until the piece has been copied; throws
    // std::runtime_error when the copy failed.
    virtual void wait() = 0;
    // Makes `stream` wait for this point on the device; false where only the host can wait.
    virtual bool hold(Stream stream) = 0;
};

// When a piece was first worked on and when it was done: nanoseconds of the steady clock.
struct PieceTimes {
    std::int64_t begin = 0;
    std::int64_t end = 0;
};

class Ticket {
public:
    enum class Until { issued, done };
    enum class Notice { every_piece, end };

    explicit Ticket(std::size_t pieces);
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;

    static std::shared_ptr<Ticket> completed();

    // --- for everybody, from any thread -----------------------------------------------------
    std::size_t pieces() const noexcept { return count_; }
    std::size_t pieces_done() const noexcept { return done_count_.load(std::memory_order_acquire); }
    std::size_t pieces_issued() const noexcept {
        return issued_count_.load(std::memory_order_acquire);
    }
    bool done() const noexcept { return state() == State::done; }
    bool failed() const noexcept { return state() == State::failed; }
    bool ended() const noexcept { return state() != State::open; }
    bool piece_done(std::size_t piece) const noexcept;
    std::string failure() const;

    // Blocks for at most `time`; false on time-out; throws std::runtime_error with the failure's
    // text when the work failed.
    bool wait_for(Until until, std::chrono::nanoseconds time) const;
    // One double per span of a square-sum; throws when the work failed or has not ended.
    std::vector<double> results() const;
    // One entry per piece, complete once the ticket is done; zeros for what has not happened yet. A
    // piece without work begins where it ends. Two clock reads per piece, some 50 ns, are too
    // little to be switched off.
    std::vector<PieceTimes> times() const;
    // Makes `stream` wait for the last pieces. All pieces must have been issued. False: nothing on
    // the device stands for the end of this work, so the host has to wait.
    bool hold_stream(Stream stream) const;
    // `waker` is told of every piece or of the end alone; at once if the ticket has ended.
    void subscribe(const std::shared_ptr<Waker>& waker, Notice notice);

    // --- for the queue that does the work -----------------------------------------------------
    // Notes the time, at the first call for a piece.
    void mark_begun(std::size_t piece) noexcept;
    // Pieces of one `queue` end in the order of their calls. A fence stands for the end of its
    // piece on the device; null: there is none.
    void mark_issued(std::shared_ptr<Fence> fence = nullptr, std::size_t queue = 0);
    void mark_done(std::size_t piece);
    void finish();
    void finish(std::vector<double> results);
    void fail(std::string_view text);

private:
    enum class State { open, done, failed };
    struct Subscription {
        std::weak_ptr<Waker> waker;
        Notice notice;
    };

    // Relaxed suffices: whoever has seen the ticket done has seen its times.
    struct Stamps {
        std::atomic<std::int64_t> begin{0};
        std::atomic<std::int64_t> end{0};
    };

    State state() const noexcept { return state_.load(std::memory_order_acquire); }
    void end(State state);
    bool reached(Until until) const noexcept;

    const std::size_t count_;
    std::unique_ptr<std::atomic<bool>[]> piece_done_;
    std::unique_ptr<Stamps[]> stamps_;
    std::atomic<std::size_t> done_count_{0};
    std::atomic<std::size_t> issued_count_{0};
    std::atomic<State> state_{State::open};

    mutable std::mutex mutex_;  // guards what follows
    mutable std::condition_variable changed_;
    std::string failure_;
    std::vector<double> results_;
    std::vector<std::shared_ptr<Fence>> last_fences_;  // of each queue
    bool has_fences_ = true;                           // every piece issued so far has one
    std::vector<Subscription> subscriptions_;
};

using TicketPtr = std::shared_ptr<Ticket>;

}  // namespace forebay
