#include "file_lane.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

namespace forebay {
namespace {

// A drive that answers "0 bytes of progress" this often in a row is not short but broken.
constexpr int kMostStalls = 16;
// Between two looks at a backend that cannot even wait: blocks under way still use the caller's
// memory, so they are waited for all the same.
constexpr auto kPause = std::chrono::milliseconds(10);

std::string system_text(int error) {
    return std::string(std::strerror(error)) + " (errno " + std::to_string(error) + ")";
}

}  // namespace

FileLane::FileLane(FileBackendPtr backend, FileQueueOptions options)
    : backend_(std::move(backend)), options_(std::move(options)), flights_(options_.depth) {
    for (std::size_t place = options_.depth; place > 0; --place) {
        free_.push_back(place - 1);
    }
}

void FileLane::submit(std::unique_ptr<FileJob> job) {
    const FileOrder order = job->order;
    {
        const std::lock_guard lock(mutex_);
        if (closing_) {
            throw std::runtime_error("file queue '" + options_.name + "' is closed");
        }
        job->age = num_jobs_++;
        waiting_.push_back(std::move(job));
    }
    wake();
    // The lane may have looked before these subscriptions: what ended meanwhile wakes it at once.
    for (const TicketPtr& predecessor : order.after) {
        predecessor->subscribe(shared_from_this(), Ticket::Notice::end);
    }
    if (order.piecewise) {
        order.piecewise->subscribe(shared_from_this(), Ticket::Notice::every_piece);
        wake();
    }
}

void FileLane::cancel(const TicketPtr& ticket) {
    {
        const std::lock_guard lock(mutex_);
        for (const auto* list : {&waiting_, &jobs_}) {
            for (const JobPtr& job : *list) {
                if (job->ticket == ticket && job->failure.empty()) {
                    job->failure = "the transfer was cancelled";
                }
            }
        }
    }
    wake();
}

void FileLane::close() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    wake();
}

FileCounters FileLane::counters() const noexcept {
    return {bytes_read_.load(std::memory_order_relaxed),
            bytes_written_.load(std::memory_order_relaxed),
            blocks_.load(std::memory_order_relaxed)};
}

void FileLane::run() {
    std::vector<FileCompletion> completed;
    Lock lock(mutex_);
    while (true) {
        look_at_waiting();
        end_jobs(lock);
        if (closing_ && free_.size() == flights_.size()) {
            break;
        }
        issue_ready(lock);
        end_jobs(lock);  // jobs without a byte end without a block
        lock.unlock();
        completed.clear();
        std::string failure;
        try {
            backend_->wait(completed);
        } catch (const std::exception& error) {
            failure = error.what();
            std::this_thread::sleep_for(kPause);
        }
        lock.lock();
        if (!failure.empty() && broken_.empty()) {
            broken_ = failure;
            news_.store(true, std::memory_order_release);
        }
        for (const FileCompletion& completion : completed) {
            complete(completion);
        }
    }
    fail_all(lock, "file queue '" + options_.name + "' was closed before this work was done");
}

// Issues blocks while there is room. With Refill::when_empty the next ones wait until all are back.
void FileLane::issue_ready(Lock& lock) {
    static_cast<void>(lock);
    if (options_.refill == Refill::when_empty && free_.size() != flights_.size()) {
        return;
    }
    while (!closing_ && !free_.empty()) {
        const JobPtr job = choose();
        if (!job) {
            return;
        }
        issue(job);
    }
}

// Moves jobs whose predecessors are done, or that have failed, to those that are served.
void FileLane::look_at_waiting() {
    if (!news_.exchange(false, std::memory_order_acq_rel)) {
        return;
    }
    std::vector<JobPtr> still;
    for (JobPtr& job : waiting_) {
        std::vector<TicketPtr>& after = job->order.after;
        for (const TicketPtr& ticket : after) {
            if (ticket->failed() && job->failure.empty()) {
                job->failure = ticket->failure();
            }
        }
        std::erase_if(after, [](const TicketPtr& ticket) { return ticket->done(); });
        const bool serves = after.empty() || !job->failure.empty() || !broken_.empty();
        (serves ? jobs_ : still).push_back(std::move(job));
    }
    waiting_ = std::move(still);
}

bool FileLane::may_go_on(const FileJob& job) {
    return job.failure.empty() && job.piece < job.spans.size() &&
           (!job.order.piecewise || job.order.piecewise->piece_done(job.piece));
}

// The ready job of lowest priority number, then age.
FileLane::JobPtr FileLane::choose() {
    JobPtr best;
    for (const JobPtr& job : jobs_) {
        const bool better = !best || job->order.priority < best->order.priority ||
                            (job->order.priority == best->order.priority && job->age < best->age);
        if (better && may_go_on(*job)) {
            best = job;
        }
    }
    return best;
}

void FileLane::issue(const JobPtr& job) {
    const FileSpan& span = job->spans[job->piece];
    if (job->position == 0) {
        job->ticket->mark_begun(job->piece);
    }
    if (span.bytes > 0) {
        const std::size_t place = free_.back();
        free_.pop_back();
        const std::size_t most = std::min(span.bytes - job->position, options_.block_bytes);
        const FileSet::Place at = job->files->place(span.offset + job->position, most);
        FileBlock block{job->action,
                        job->files->descriptor(at.file),
                        span.address + job->position,
                        at.offset,
                        at.bytes,
                        place};
        flights_[place] = {job, job->piece, at.file, block, 0};
        ++job->outstanding;
        job->position += at.bytes;
        blocks_.fetch_add(1, std::memory_order_relaxed);
        backend_->submit(block);
        if (options_.handover == Handover::single) {
            backend_->flush();
        }
    }
    if (job->position == span.bytes) {
        job->ticket->mark_issued();
        if (span.bytes == 0) {
            job->ticket->mark_done(job->piece);
        }
        ++job->piece;
        job->position = 0;
    }
}

void FileLane::complete(const FileCompletion& completion) {
    Flight& flight = flights_[completion.tag];
    const std::int64_t result = completion.result;
    if (result == -EINTR || result == -EAGAIN) {
        retry(flight, 0);
        return;
    }
    if (result < 0) {
        flight.job->failure = text_of(flight, system_text(static_cast<int>(-result)));
    } else if (result == 0) {
        flight.job->failure = text_of(flight, "the file ends there");
    } else if (static_cast<std::size_t>(result) < flight.block.bytes) {
        // From a sector's beginning: that is all that O_DIRECT accepts.
        retry(flight, static_cast<std::size_t>(result) / kFileAlignment * kFileAlignment);
        return;
    } else {
        flight.stalls = 0;
        land(flight);
        return;
    }
    land(flight);
}

void FileLane::retry(Flight& flight, std::size_t bytes) {
    flight.stalls = bytes > 0 ? 0 : flight.stalls + 1;
    flight.block.address += bytes;
    flight.block.offset += bytes;
    flight.block.bytes -= bytes;
    flight.job->left[flight.piece] -= bytes;
    if (flight.stalls >= kMostStalls) {
        flight.job->failure =
            text_of(flight, "no progress in " + std::to_string(kMostStalls) + " attempts");
    }
    if (!flight.job->failure.empty()) {
        land(flight);
        return;
    }
    backend_->submit(flight.block);
}

// The block is over, for good or ill.
void FileLane::land(Flight& flight) {
    const JobPtr job = std::move(flight.job);
    flight.job = nullptr;
    free_.push_back(static_cast<std::size_t>(flight.block.tag));
    --job->outstanding;
    if (!job->failure.empty()) {
        return;
    }
    std::size_t& left = job->left[flight.piece];
    left -= flight.block.bytes;
    if (left == 0) {
        const std::size_t bytes = job->spans[flight.piece].bytes;
        auto& counter = job->action == FileAction::read ? bytes_read_ : bytes_written_;
        counter.fetch_add(bytes, std::memory_order_relaxed);
        job->ticket->mark_done(flight.piece);
    }
}

std::string FileLane::text_of(const Flight& flight, const std::string& reason) const {
    const bool reads = flight.block.action == FileAction::read;
    return std::string(reads ? "reading " : "writing ") + std::to_string(flight.block.bytes) +
           " bytes at byte " + std::to_string(flight.block.offset) + " of " +
           flight.job->files->name(flight.file) + " failed: " + reason;
}

// Ends jobs that are done, and failed ones as soon as none of their blocks is out any more: until
// then the caller's memory is still written.
void FileLane::end_jobs(Lock& lock) {
    std::vector<JobPtr> ended;
    std::vector<JobPtr> open;
    for (JobPtr& job : jobs_) {
        if (job->failure.empty()) {
            job->failure = broken_;
        }
        if (job->failure.empty() && job->order.piecewise && job->order.piecewise->failed()) {
            job->failure = job->order.piecewise->failure();
        }
        const bool complete = job->piece == job->spans.size();
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

void FileLane::fail_all(Lock& lock, const std::string& text) {
    std::vector<JobPtr> left = std::move(jobs_);
    left.insert(left.end(), waiting_.begin(), waiting_.end());
    jobs_.clear();
    waiting_.clear();
    lock.unlock();
    for (const JobPtr& job : left) {
        job->ticket->fail(job->failure.empty() ? text : job->failure);
    }
    lock.lock();
}

}  // namespace forebay
