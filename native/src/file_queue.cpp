#include "forebay/file_queue.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "file_lane.h"

namespace forebay {
namespace {

// The kernel takes 2 GiB less a page at once.
constexpr std::size_t kMostBlockBytes = std::size_t{1} << 30;

void check_multiple(const char* what, std::uint64_t value) {
    if (value % kFileAlignment != 0) {
        throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) +
                                    ", which must be a multiple of " +
                                    std::to_string(kFileAlignment));
    }
}

}  // namespace

FileSet::FileSet(const std::vector<int>& descriptors, std::vector<std::string> names,
                 std::size_t stripe_bytes)
    : names_(std::move(names)), stripe_bytes_(stripe_bytes) {
    check_multiple("the length of a stripe", stripe_bytes);
    if (descriptors.empty() || stripe_bytes == 0 || names_.size() != descriptors.size()) {
        throw std::invalid_argument("a set needs stripes and a name for each file; got " +
                                    std::to_string(descriptors.size()) + " files, " +
                                    std::to_string(names_.size()) + " names");
    }
    for (const int descriptor : descriptors) {
        const int own = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
        if (own < 0) {
            const std::string text = std::strerror(errno);
            for (const int earlier : descriptors_) {
                ::close(earlier);
            }
            throw std::invalid_argument("descriptor " + std::to_string(descriptor) + ": " + text);
        }
        descriptors_.push_back(own);
    }
}

FileSet::~FileSet() {
    for (const int descriptor : descriptors_) {
        ::close(descriptor);
    }
}

FileSet::Place FileSet::place(std::uint64_t offset, std::size_t bytes) const noexcept {
    const std::uint64_t stripe = offset / stripe_bytes_;
    const std::size_t inside = offset % stripe_bytes_;
    if (descriptors_.size() == 1) {
        return {0, offset, bytes};
    }
    return {static_cast<std::size_t>(stripe % descriptors_.size()),
            stripe / descriptors_.size() * stripe_bytes_ + inside,
            std::min(bytes, stripe_bytes_ - inside)};
}

FileQueue::FileQueue(FileBackendPtr backend, FileQueueOptions options) {
    if (options.depth == 0 || options.block_bytes == 0) {
        throw std::invalid_argument("a file queue needs a depth and a block length of at least 1");
    }
    check_multiple("the length of a block", options.block_bytes);
    if (options.block_bytes > kMostBlockBytes) {
        throw std::invalid_argument("a block of " + std::to_string(options.block_bytes) +
                                    " bytes is longer than " + std::to_string(kMostBlockBytes));
    }
    lane_ = std::make_shared<FileLane>(std::move(backend), std::move(options));
    thread_ =
        std::make_unique<OwnThread>("forebay-" + lane_->name(), [lane = lane_] { lane->run(); });
}

void FileQueue::check_process() const {
    if (thread_ && !thread_->in_its_process()) {
        throw std::runtime_error(
            "this file queue's thread belongs to the parent of a forked process\n"
            "hint: create the queue after fork, or use the spawn start method");
    }
}

TicketPtr FileQueue::transfer(FileAction action, FileSetPtr files, std::vector<FileSpan> spans,
                              FileOrder order) {
    check_process();
    auto job = std::make_unique<FileJob>();
    for (const FileSpan& span : spans) {
        check_multiple("an offset", span.offset);
        check_multiple("an address", span.address);
        check_multiple("a length", span.bytes);
        if (span.bytes > 0 && span.address == 0) {
            throw std::invalid_argument("a span of " + std::to_string(span.bytes) +
                                        " bytes has no address");
        }
        job->left.push_back(span.bytes);
    }
    if (order.piecewise && !order.piecewise->ended() && order.piecewise->pieces() < spans.size()) {
        throw std::invalid_argument("the transfer has " + std::to_string(spans.size()) +
                                    " pieces, but the work it follows piece by piece has " +
                                    std::to_string(order.piecewise->pieces()));
    }
    job->ticket = std::make_shared<Ticket>(spans.size());
    job->action = action;
    job->files = std::move(files);
    job->spans = std::move(spans);
    job->order = std::move(order);
    TicketPtr ticket = job->ticket;
    lane_->submit(std::move(job));
    return ticket;
}

void FileQueue::cancel(const TicketPtr& ticket) {
    check_process();
    lane_->cancel(ticket);
}

FileCounters FileQueue::counters() const noexcept { return lane_->counters(); }

void FileQueue::close() {
    const std::lock_guard lock(closing_);
    if (!thread_) {
        return;
    }
    if (!thread_->in_its_process()) {
        static_cast<void>(new std::shared_ptr<FileLane>(lane_));  // see Pool::close
        thread_.reset();
        return;
    }
    lane_->close();
    thread_.reset();
}

}  // namespace forebay
