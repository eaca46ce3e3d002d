#include "forebay/pool.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "work.h"

namespace forebay {
namespace {

constexpr const char* kClosed = "the update pool was closed before this work was done";

// Text of the first failed predecessor, or "" ; `all_done` tells whether all of them are done.
std::string look_at(const std::vector<TicketPtr>& after, bool& all_done) {
    all_done = true;
    for (const TicketPtr& ticket : after) {
        if (ticket->failed()) {
            return ticket->failure();
        }
        all_done = all_done && ticket->done();
    }
    return "";
}

}  // namespace

void PoolQueue::submit(TicketPtr ticket, std::unique_ptr<Work> work, std::vector<TicketPtr> after) {
    auto job = std::make_shared<Job>();
    job->ticket = std::move(ticket);
    job->work = std::move(work);
    job->after = std::move(after);
    job->chunks = job->work->chunks();
    job->left.store(job->chunks, std::memory_order_relaxed);
    const std::vector<TicketPtr> predecessors = job->after;
    {
        const std::lock_guard lock(mutex_);
        if (closed_) {
            throw std::runtime_error("the update pool is closed");
        }
        waiting_.push_back(std::move(job));
        predecessors_changed_ = true;
        changed_.notify_one();
    }
    // Unconditionally: one that has ended since a worker looked wakes the queue by itself.
    for (const TicketPtr& predecessor : predecessors) {
        predecessor->subscribe(shared_from_this(), Ticket::Notice::end);
    }
}

void PoolQueue::wake() noexcept {
    const std::lock_guard lock(mutex_);
    predecessors_changed_ = true;
    changed_.notify_one();
}

// Moves work whose predecessors are done to the ready list, in order of age, and ends what has
// failed predecessors or no chunks. Unlocks while it ends tickets: they wake others.
void PoolQueue::promote(std::unique_lock<std::mutex>& lock) {
    predecessors_changed_ = false;
    std::vector<std::pair<JobPtr, std::string>> to_fail;
    std::vector<JobPtr> to_begin;
    std::vector<JobPtr> still_waiting;
    for (JobPtr& job : waiting_) {
        bool all_done = false;
        std::string failure = look_at(job->after, all_done);
        if (!failure.empty()) {
            to_fail.emplace_back(std::move(job), std::move(failure));
        } else if (all_done) {
            to_begin.push_back(std::move(job));
        } else {
            still_waiting.push_back(std::move(job));
        }
    }
    waiting_ = std::move(still_waiting);
    running_.insert(running_.end(), to_begin.begin(), to_begin.end());
    lock.unlock();
    for (auto& [job, failure] : to_fail) {
        job->ticket->fail(failure);
    }
    std::vector<JobPtr> to_run;
    for (JobPtr& job : to_begin) {
        job->after.clear();
        job->work->begin(*job->ticket);
        if (job->chunks == 0) {
            end_job(*job);
        } else {
            to_run.push_back(job);
        }
    }
    lock.lock();
    std::erase_if(running_, [](const JobPtr& job) { return job->ticket->ended(); });
    if (!to_run.empty()) {
        ready_.insert(ready_.end(), to_run.begin(), to_run.end());
        changed_.notify_all();
    }
}

void PoolQueue::run_chunk(Job& job, std::size_t chunk) {
    if (!job.broken.load(std::memory_order_acquire)) {
        try {
            job.ticket->mark_begun(job.work->piece_of(chunk));
            job.work->run(chunk, *job.ticket);
        } catch (const std::exception& error) {
            break_job(job, error.what());
        }
    }
    if (job.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        end_job(job);
    }
}

void PoolQueue::break_job(Job& job, const char* text) {
    if (!job.broken.exchange(true, std::memory_order_acq_rel)) {
        job.ticket->fail(text);
    }
}

void PoolQueue::end_job(Job& job) {
    if (job.broken.load(std::memory_order_acquire)) {
        return;
    }
    try {
        job.work->end(*job.ticket);
    } catch (const std::exception& error) {
        break_job(job, error.what());
    }
}

void PoolQueue::work_until_closed() {
    std::unique_lock lock(mutex_);
    while (!closed_) {
        if (predecessors_changed_) {
            promote(lock);
            continue;
        }
        if (ready_.empty()) {
            changed_.wait(lock);
            continue;
        }
        const JobPtr job = ready_.front();
        const std::size_t chunk = job->next++;
        if (job->next == job->chunks) {
            ready_.pop_front();
        }
        lock.unlock();
        run_chunk(*job, chunk);
        const bool ended = job->ticket->ended();
        lock.lock();
        if (ended) {
            std::erase(running_, job);
        }
    }
}

void PoolQueue::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
}

void PoolQueue::fail_what_is_left() {
    std::vector<JobPtr> left;
    {
        const std::lock_guard lock(mutex_);
        left = std::move(waiting_);
        left.insert(left.end(), running_.begin(), running_.end());
        waiting_.clear();
        running_.clear();
        ready_.clear();
    }
    for (const JobPtr& job : left) {
        if (!job->ticket->ended()) {
            job->ticket->fail(kClosed);
        }
    }
}

TicketPtr PoolQueue::fold(std::vector<FoldSpan> spans, DType source_dtype, bool first,
                          std::vector<TicketPtr> after, float scale) {
    auto work = std::make_unique<FoldWork>(table_, std::move(spans), source_dtype, first, scale);
    auto ticket = std::make_shared<Ticket>(1);
    submit(ticket, std::move(work), std::move(after));
    return ticket;
}

Pool::Pool(const KernelTable& table, std::size_t threads, const std::vector<int>& cpus)
    : queue_(std::make_shared<PoolQueue>(table)), num_threads_(threads) {
    if (threads == 0) {
        throw std::invalid_argument("a pool needs at least 1 thread, not 0");
    }
    workers_.reserve(threads);
    for (std::size_t i = 0; i < threads; ++i) {
        try {
            workers_.emplace_back("forebay-update", [queue = queue_] {
                OwnThread::give_way();
                queue->work_until_closed();
            });
        } catch (...) {
            queue_->close();  // else joining the workers that did start would never end
            throw;
        }
        if (cpus.empty()) {
            continue;
        }
        const bool one_each = cpus.size() >= threads;
        std::string error = workers_.back().pin(one_each ? std::vector<int>{cpus[i]} : cpus);
        if (pinning_error_.empty()) {
            pinning_error_ = std::move(error);
        }
    }
}

void Pool::check_process() const {
    if (!workers_.empty() && !workers_.front().in_its_process()) {
        throw std::runtime_error(
            "this pool's threads belong to the parent of a forked process\n"
            "hint: create the pool after fork, or use the spawn start method");
    }
}

TicketPtr Pool::update(const PartState& part, UpdateRequest request, std::vector<TicketPtr> after) {
    check_process();
    auto work = std::make_unique<UpdateWork>(table(), UpdatePass(part, std::move(request)));
    auto ticket = std::make_shared<Ticket>(work->pieces());
    queue_->submit(ticket, std::move(work), std::move(after));
    return ticket;
}

TicketPtr Pool::fold(std::vector<FoldSpan> spans, DType source_dtype, bool first,
                     std::vector<TicketPtr> after, float scale) {
    check_process();
    return queue_->fold(std::move(spans), source_dtype, first, std::move(after), scale);
}

TicketPtr Pool::square_sums(std::vector<ElementSpan> spans, DType dtype,
                            std::vector<TicketPtr> after) {
    check_process();
    auto work = std::make_unique<SquareWork>(table(), std::move(spans), dtype);
    auto ticket = std::make_shared<Ticket>(1);
    queue_->submit(ticket, std::move(work), std::move(after));
    return ticket;
}

TicketPtr Pool::checksums(ChecksumRequest request, std::vector<TicketPtr> after) {
    check_process();
    auto work = std::make_unique<ChecksumWork>(table(), std::move(request));
    auto ticket = std::make_shared<Ticket>(1);
    queue_->submit(ticket, std::move(work), std::move(after));
    return ticket;
}

void Pool::close() {
    const std::lock_guard lock(closing_);
    if (workers_.empty()) {
        return;
    }
    if (!workers_.front().in_its_process()) {
        // A forked child: the queue's locks may be held by threads that do not exist here, so it
        // is neither locked nor destroyed.
        static_cast<void>(new std::shared_ptr<PoolQueue>(queue_));
        workers_.clear();
        return;
    }
    queue_->close();
    workers_.clear();
    queue_->fail_what_is_left();
}

}  // namespace forebay
