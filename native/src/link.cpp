#include "forebay/link.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "lane.h"

namespace forebay {
namespace {

constexpr std::size_t kMostStreams = 64;  // a job remembers them in as many bits

void check_piecewise(const TicketPtr& piecewise, std::size_t pieces) {
    if (piecewise && !piecewise->ended() && piecewise->pieces() < pieces) {
        throw std::invalid_argument("the copy has " + std::to_string(pieces) +
                                    " pieces, but the work it follows piece by piece has " +
                                    std::to_string(piecewise->pieces()));
    }
}

// Packs the spans into slots. Offsets inside a slot are multiples of the item size, since spans
// are whole items and slots begin at multiples of 4 bytes.
void pack(const FoldRequest& request, CopyPieces& copies, LaneFold& fold) {
    const std::size_t item = item_bytes(request.source_dtype);
    const std::size_t slot_elements = request.ring->slot_bytes() / item;
    std::size_t used = slot_elements;  // of the last piece; full: the first span opens a piece
    for (FoldSpan span : request.spans) {
        while (span.elements > 0) {
            if (used == slot_elements) {
                copies.emplace_back();
                fold.pieces.emplace_back();
                used = 0;
            }
            const std::size_t now = std::min(span.elements, slot_elements - used);
            copies.back().push_back({used * item, span.source, now * item});
            fold.pieces.back().push_back({span.accumulator, used * item, now});
            used += now;
            span.accumulator += now * sizeof(float);
            span.source += now * item;
            span.elements -= now;
        }
    }
}

}  // namespace

Link::Link(CopyEnginePtr engine, LinkOptions options) {
    if (options.max_in_flight == 0) {
        throw std::invalid_argument("max_in_flight must be at least 1, not 0");
    }
    if (options.streams.empty() || options.streams.size() > kMostStreams) {
        throw std::invalid_argument("a link needs 1 to " + std::to_string(kMostStreams) +
                                    " streams, not " + std::to_string(options.streams.size()));
    }
    lane_ = std::make_shared<Lane>(std::move(engine), std::move(options));
    thread_ = std::make_unique<OwnThread>(lane_->name(), [lane = lane_] { lane->run(); });
}

void Link::check_process() const {
    if (thread_ && !thread_->in_its_process()) {
        throw std::runtime_error(
            "this link's thread belongs to the parent of a forked process\n"
            "hint: create the link after fork, or use the spawn start method");
    }
}

TicketPtr Link::copy(const CopyPlan& plan, LinkOrder order) {
    check_process();
    check_piecewise(order.piecewise, plan.pieces());
    auto job = std::make_unique<LaneJob>();
    job->pieces = plan.snapshot();
    job->order = std::move(order);
    job->ticket = std::make_shared<Ticket>(plan.pieces());
    TicketPtr ticket = job->ticket;
    lane_->submit(std::move(job));
    return ticket;
}

TicketPtr Link::copy_fold(FoldRequest request, LinkOrder order) {
    check_process();
    auto copies = std::make_shared<CopyPieces>();
    auto fold = std::make_unique<LaneFold>();
    pack(request, *copies, *fold);
    fold->dtype = request.source_dtype;
    fold->first = request.first;
    fold->pool = std::move(request.pool);
    fold->ring = std::move(request.ring);
    check_piecewise(order.piecewise, copies->size());
    auto job = std::make_unique<LaneJob>();
    job->ticket = std::make_shared<Ticket>(copies->size());
    job->pieces = std::move(copies);
    job->fold = std::move(fold);
    job->order = std::move(order);
    TicketPtr ticket = job->ticket;
    lane_->submit(std::move(job));
    return ticket;
}

void Link::close() {
    const std::lock_guard lock(closing_);
    if (!thread_) {
        return;
    }
    if (!thread_->in_its_process()) {
        static_cast<void>(new std::shared_ptr<Lane>(lane_));  // see Pool::close
        thread_.reset();
        return;
    }
    lane_->close();
    thread_.reset();
}

}  // namespace forebay
