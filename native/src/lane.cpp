#include "lane.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

namespace forebay {
namespace {

// A question about an event takes the device's lock, which every launch of a kernel needs too: 80
// thousand questions a second doubled what a backward's launches took.
constexpr auto kEventPause = std::chrono::microseconds(250);
// One question of so many is about another job than the oldest.
constexpr std::size_t kOthersTurn = 8;

// Never empty: an empty text would read as no failure.
std::string reason(const std::exception& error) {
    const std::string text = error.what();
    return text.empty() ? "the copy engine failed without a reason" : text;
}

}  // namespace

Lane::Lane(CopyEnginePtr engine, LinkOptions options)
    : engine_(std::move(engine)),
      options_(std::move(options)),
      random_(static_cast<std::uint64_t>(options_.shuffle_seed)) {}

void Lane::submit(std::unique_ptr<LaneJob> job) {
    const LinkOrder order = job->order;
    const std::shared_ptr<StagingRing> ring = job->fold ? job->fold->ring : nullptr;
    if (ring) {
        ring->subscribe(shared_from_this());
    }
    {
        const std::lock_guard lock(mutex_);
        if (closing_) {
            throw std::runtime_error("link '" + options_.name + "' is closed");
        }
        job->age = num_jobs_++;
        jobs_.push_back(std::move(job));
        dirty_ = true;
        changed_.notify_one();
    }
    // The lane may have looked before these subscriptions: what ended (subscribe wakes) or went on
    // by a piece in between must make it look again.
    for (const TicketPtr& predecessor : order.after) {
        predecessor->subscribe(shared_from_this(), Ticket::Notice::end);
    }
    if (order.piecewise) {
        order.piecewise->subscribe(shared_from_this(), Ticket::Notice::every_piece);
        wake();
    }
}

void Lane::wake() noexcept {
    const std::lock_guard lock(mutex_);
    dirty_ = true;
    changed_.notify_one();
}

void Lane::close() {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    dirty_ = true;
    changed_.notify_one();
}

void Lane::run() {
    try {
        engine_->enter_lane();
    } catch (const std::exception& error) {
        broken_ = reason(error);
    }
    Lock lock(mutex_);
    while (true) {
        dirty_ = false;
        settle_folds(lock);
        end_jobs(lock);
        if (closing_ && flights_.empty() && foldings_.empty()) {
            break;
        }
        if (!closing_ && flights_.size() < options_.max_in_flight) {
            std::size_t slot = 0;
            if (const JobPtr job = choose(slot)) {
                issue(lock, job, slot);
                continue;
            }
        }
        if (!flights_.empty()) {
            land_oldest(lock);
            continue;
        }
        wait_for_change(lock);
    }
    fail_all(lock, "link '" + options_.name + "' was closed before this work was done");
}

bool Lane::may_go_on(const LaneJob& job) const {
    if (!job.failure.empty() || job.next == job.pieces->size()) {
        return false;
    }
    const bool all_done = std::all_of(job.order.after.begin(), job.order.after.end(),
                                      [](const TicketPtr& ticket) { return ticket->done(); });
    return all_done && (!job.order.piecewise || job.order.piecewise->piece_done(job.next));
}

// Nothing tells a lane that an event has been reached: it looks again after a while.
void Lane::wait_for_change(Lock& lock) {
    const auto changed = [&] { return dirty_; };
    if (awaits_event_) {
        changed_.wait_for(lock, kEventPause, changed);
    } else {
        changed_.wait(lock, changed);
    }
}

bool Lane::is_held(const LaneJob& job) const {
    return options_.awaits_events && job.order.event != 0 && !job.event_reached;
}

// Asks whether events have been reached, one at a time and seldom. Those of one stream are reached
// in the order of the jobs, so the oldest is asked for and what follows it as long as the answer is
// yes. Now and then it is another's turn: where streams differ, none waits for ever behind one that
// is reached after it.
void Lane::ask_for_events() {
    std::vector<JobPtr> held;
    std::copy_if(jobs_.begin(), jobs_.end(), std::back_inserter(held),
                 [&](const JobPtr& job) { return may_go_on(*job) && is_held(*job); });
    const auto now = std::chrono::steady_clock::now();
    if (!held.empty() && now - asked_at_ >= kEventPause) {
        asked_at_ = now;
        const bool others = ++questions_ % kOthersTurn == 0 || options_.shuffle_seed >= 0;
        std::size_t index = others ? random_() % held.size() : 0;
        while (!held.empty() && has_reached_event(*held[index])) {
            held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
            index = 0;
        }
    }
    awaits_event_ = !held.empty();
}

bool Lane::has_reached_event(LaneJob& job) {
    try {
        job.event_reached = engine_->reached(job.order.event);
    } catch (const std::exception& error) {
        job.failure = reason(error);
        dirty_ = true;  // it ends in the next round
    }
    return job.event_reached || !job.failure.empty();
}

// The ready job of best priority, then age, whose ring (if it has one) has a free slot.
Lane::JobPtr Lane::choose(std::size_t& slot) {
    ask_for_events();
    std::vector<JobPtr> ready;
    std::copy_if(jobs_.begin(), jobs_.end(), std::back_inserter(ready),
                 [&](const JobPtr& job) { return may_go_on(*job) && !is_held(*job); });
    if (options_.shuffle_seed >= 0) {
        std::shuffle(ready.begin(), ready.end(), random_);
    } else {
        std::sort(ready.begin(), ready.end(), [](const JobPtr& a, const JobPtr& b) {
            return std::pair(a->order.priority, a->age) < std::pair(b->order.priority, b->age);
        });
    }
    for (const JobPtr& job : ready) {
        if (!job->fold) {
            return job;
        }
        if (const auto free = job->fold->ring->try_acquire()) {
            slot = *free;
            return job;
        }
    }
    return nullptr;
}

void Lane::issue(Lock& lock, const JobPtr& job, std::size_t slot) {
    const std::size_t piece = job->next++;
    ++job->outstanding;
    lock.unlock();
    const std::size_t queue = turn_++ % options_.streams.size();
    const Stream stream = options_.streams[queue];
    job->ticket->mark_begun(piece);
    std::string failure;
    std::shared_ptr<Fence> fence;
    try {
        hold_stream(*job, queue);
        if (job->fold) {
            std::vector<CopySpan> spans = (*job->pieces)[piece];
            for (CopySpan& span : spans) {
                span.destination += job->fold->ring->address_of(slot);
            }
            fence = engine_->submit(stream, spans);
        } else {
            fence = engine_->submit(stream, (*job->pieces)[piece]);
        }
    } catch (const std::exception& error) {
        failure = reason(error);
    }
    if (failure.empty()) {
        job->ticket->mark_issued(job->fold ? nullptr : fence, queue);
        flights_.push_back({job, piece, std::move(fence), slot});
    } else if (job->fold) {
        job->fold->ring->release(slot);
    }
    lock.lock();
    if (!failure.empty()) {
        --job->outstanding;
        job->failure = failure;
    } else if (flights_.back().fence == nullptr) {
        land_oldest(lock);
    }
}

void Lane::hold_stream(LaneJob& job, std::size_t queue) {
    const std::uint64_t bit = std::uint64_t{1} << queue;
    if (job.order.event == 0 || options_.awaits_events || (job.held & bit) != 0) {
        return;
    }
    engine_->hold_stream(options_.streams[queue], job.order.event);
    job.held |= bit;
}

void Lane::land_oldest(Lock& lock) {
    Flight flight = std::move(flights_.front());
    flights_.pop_front();
    lock.unlock();
    std::string failure;
    try {
        if (flight.fence) {
            flight.fence->wait();
        }
        if (flight.job->fold) {
            start_fold(flight);
        } else {
            flight.job->ticket->mark_done(flight.piece);
        }
    } catch (const std::exception& error) {
        failure = reason(error);
        if (flight.job->fold) {
            flight.job->fold->ring->release(flight.slot);
        }
    }
    lock.lock();
    if (!failure.empty()) {
        flight.job->failure = failure;
        --flight.job->outstanding;
    } else if (!flight.job->fold) {
        --flight.job->outstanding;
    }
}

void Lane::start_fold(const Flight& flight) {
    const LaneFold& fold = *flight.job->fold;
    const Address slot = fold.ring->address_of(flight.slot);
    std::vector<FoldSpan> spans;
    for (const SlotSpan& span : fold.pieces[flight.piece]) {
        spans.push_back({span.accumulator, slot + span.slot_offset, span.elements});
    }
    TicketPtr ticket = fold.pool->fold(std::move(spans), fold.dtype, fold.first, {});
    ticket->subscribe(shared_from_this(), Ticket::Notice::end);
    foldings_.push_back({flight.job, flight.piece, flight.slot, std::move(ticket)});
}

void Lane::settle_folds(Lock& lock) {
    std::vector<Folding> ended;
    std::vector<Folding> still;
    for (Folding& folding : foldings_) {
        (folding.ticket->ended() ? ended : still).push_back(std::move(folding));
    }
    foldings_ = std::move(still);
    if (ended.empty()) {
        return;
    }
    lock.unlock();
    for (const Folding& folding : ended) {
        folding.job->fold->ring->release(folding.slot);
        if (folding.ticket->done()) {
            folding.job->ticket->mark_done(folding.piece);
        }
    }
    lock.lock();
    for (const Folding& folding : ended) {
        --folding.job->outstanding;
        if (folding.ticket->failed()) {
            folding.job->failure = folding.ticket->failure();
        }
    }
}

void Lane::look_at_predecessors(LaneJob& job) const {
    if (!job.failure.empty()) {
        return;
    }
    job.failure = broken_;
    for (const TicketPtr& ticket : job.order.after) {
        if (ticket->failed()) {
            job.failure = ticket->failure();
        }
    }
    if (job.order.piecewise && job.order.piecewise->failed()) {
        job.failure = job.order.piecewise->failure();
    }
}

// Ends jobs that are done, and failed ones as soon as none of their pieces is out any more: until
// then the caller's memory is still written.
void Lane::end_jobs(Lock& lock) {
    std::vector<JobPtr> ended;
    std::vector<JobPtr> open;
    for (JobPtr& job : jobs_) {
        look_at_predecessors(*job);
        const bool ready = std::all_of(job->order.after.begin(), job->order.after.end(),
                                       [](const TicketPtr& ticket) { return ticket->done(); });
        const bool complete = job->next == job->pieces->size() && ready;
        const bool ends = job->outstanding == 0 && (!job->failure.empty() || complete);
        (ends ? ended : open).push_back(std::move(job));
    }
    jobs_ = std::move(open);
    if (ended.empty()) {
        return;
    }
    lock.unlock();
    for (const JobPtr& job : ended) {
        if (job->failure.empty()) {
            job->ticket->finish();
        } else {
            job->ticket->fail(job->failure);
        }
    }
    lock.lock();
}

void Lane::fail_all(Lock& lock, const std::string& text) {
    std::vector<JobPtr> left = std::move(jobs_);
    jobs_.clear();
    lock.unlock();
    for (const JobPtr& job : left) {
        job->ticket->fail(job->failure.empty() ? text : job->failure);
    }
    lock.lock();
}

}  // namespace forebay
