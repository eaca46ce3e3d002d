// Link: one direction of data movement, done by one native thread. It feeds a copy engine piece
// by piece, at most `max_in_flight` at a time, so that whatever else uses the same hardware queue
// never waits for more than those pieces. It knows nothing of training.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "forebay/copy_engine.h"
#include "forebay/copy_plan.h"
#include "forebay/pool.h"
#include "forebay/threads.h"
#include "forebay/ticket.h"
#include "forebay/types.h"

namespace forebay {

struct LinkOptions {
    // Pieces take them in turn. A copy engine may stay with a stream for as long as more work
    // stands in it; of two with one piece each, both run empty all the time, and others' copies get
    // theirs.
    std::vector<Stream> streams = {0};
    std::size_t max_in_flight = 2;
    // Tests: a non-negative seed makes the lane take a random ready job instead of the best one.
    std::int64_t shuffle_seed = -1;
    std::string name = "link";
    // Await a job's event before its first piece is enqueued, instead of holding the streams: what
    // stands in the hardware's queue then never waits for computation, nor does what others, on
    // streams of their own, have behind it in that queue.
    bool awaits_events = false;
};

// When a job may go on. Among jobs that may, the lowest priority number goes first, then age; the
// choice is made anew at every piece.
struct LinkOrder {
    int priority = 0;
    std::vector<TicketPtr> after;
    TicketPtr piecewise;  // piece i waits for its piece i; may be null
    Event event = 0;      // awaited before the first piece; 0: none
};

// A sum on its way: pieces of source are copied into a ring slot and folded from there by a pool.
struct FoldRequest {
    std::vector<FoldSpan> spans;
    DType source_dtype = DType::float32;
    bool first = false;
    std::shared_ptr<PoolQueue> pool;
    std::shared_ptr<StagingRing> ring;
};

class Lane;

class Link {
public:
    Link(CopyEnginePtr engine, LinkOptions options);
    ~Link() { close(); }
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    // Pieces are issued in ascending order; the ticket's piece i is done when its bytes are there.
    TicketPtr copy(const CopyPlan& plan, LinkOrder order);
    // The ticket's piece i is done when it has been folded. Memory in use never exceeds the ring.
    TicketPtr copy_fold(FoldRequest request, LinkOrder order);
    // Ends pieces in flight, joins the thread and fails what is left. Idempotent.
    void close();

private:
    void check_process() const;

    std::shared_ptr<Lane> lane_;
    std::mutex closing_;
    std::unique_ptr<OwnThread> thread_;
};

}  // namespace forebay
