// Lane: the state machine that a Link's thread runs. A job is waiting, ready (its next piece may
// be issued), draining (failed or fully issued, pieces still out) or ended.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "forebay/link.h"

namespace forebay {

// A fold's destination of one piece: where its spans lie inside the slot.
struct SlotSpan {
    Address accumulator = 0;
    std::size_t slot_offset = 0;
    std::size_t elements = 0;
};

struct LaneFold {
    std::vector<std::vector<SlotSpan>> pieces;
    DType dtype = DType::float32;
    bool first = false;
    std::shared_ptr<PoolQueue> pool;
    std::shared_ptr<StagingRing> ring;
};

// With a fold, destinations of `pieces` are offsets into the slot.
struct LaneJob {
    TicketPtr ticket;
    std::shared_ptr<const CopyPieces> pieces;
    std::unique_ptr<const LaneFold> fold;
    LinkOrder order;
    std::uint64_t age = 0;
    std::size_t next = 0;         // piece to issue
    std::uint64_t held = 0;       // streams that wait for the event, a bit each
    bool event_reached = false;   // where the lane awaits events
    std::size_t outstanding = 0;  // pieces in flight or being folded
    std::string failure;
};

class Lane final : public Waker, public std::enable_shared_from_this<Lane> {
public:
    Lane(CopyEnginePtr engine, LinkOptions options);

    // Throws std::runtime_error when the lane is closed.
    void submit(std::unique_ptr<LaneJob> job);
    void wake() noexcept override;
    void run();
    void close();
    const std::string& name() const noexcept { return options_.name; }

private:
    using JobPtr = std::shared_ptr<LaneJob>;
    using Lock = std::unique_lock<std::mutex>;
    struct Flight {
        JobPtr job;
        std::size_t piece;
        std::shared_ptr<Fence> fence;  // null: done already
        std::size_t slot;
    };
    struct Folding {
        JobPtr job;
        std::size_t piece;
        std::size_t slot;
        TicketPtr ticket;
    };

    JobPtr choose(std::size_t& slot);
    bool may_go_on(const LaneJob& job) const;
    bool is_held(const LaneJob& job) const;
    void ask_for_events();
    bool has_reached_event(LaneJob& job);
    void wait_for_change(Lock& lock);
    void issue(Lock& lock, const JobPtr& job, std::size_t slot);
    void hold_stream(LaneJob& job, std::size_t queue);
    void land_oldest(Lock& lock);
    void start_fold(const Flight& flight);
    void settle_folds(Lock& lock);
    void end_jobs(Lock& lock);
    void look_at_predecessors(LaneJob& job) const;
    void fail_all(Lock& lock, const std::string& text);

    const CopyEnginePtr engine_;
    const LinkOptions options_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool dirty_ = false;
    bool closing_ = false;
    bool awaits_event_ = false;  // something could go on but for its event
    std::string broken_;         // why the engine cannot serve this lane
    std::vector<JobPtr> jobs_;
    std::uint64_t num_jobs_ = 0;
    // The lane's thread alone uses what follows.
    std::deque<Flight> flights_;
    std::vector<Folding> foldings_;
    std::mt19937_64 random_;
    std::size_t turn_ = 0;  // pieces issued so far: whose stream is next
    std::size_t questions_ = 0;
    std::chrono::steady_clock::time_point asked_at_;
};

}  // namespace forebay
