#include "forebay/copy_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace forebay {
namespace {

bool continues(const CopySpan& before, const CopySpan& after) noexcept {
    return before.destination + before.bytes == after.destination &&
           before.source + before.bytes == after.source;
}

void put(std::vector<CopySpan>& piece, const CopySpan& span) {
    if (!piece.empty() && continues(piece.back(), span)) {
        piece.back().bytes += span.bytes;
    } else {
        piece.push_back(span);
    }
}

}  // namespace

CopyPlan::CopyPlan(std::size_t piece_bytes)
    : piece_bytes_(piece_bytes), shared_(std::make_shared<Shared>()) {
    if (piece_bytes == 0) {
        throw std::invalid_argument("piece_bytes must be at least 1, not 0");
    }
}

std::shared_ptr<const CopyPieces> CopyPlan::snapshot() const {
    shared_->seen.store(true, std::memory_order_relaxed);
    return {shared_, &shared_->pieces};
}

CopyPieces& CopyPlan::own_pieces() {
    if (shared_->seen.load(std::memory_order_relaxed)) {
        auto copy = std::make_shared<Shared>();
        copy->pieces = shared_->pieces;
        shared_ = std::move(copy);
    }
    return shared_->pieces;
}

void CopyPlan::append(CopySpan span) {
    CopyPieces& pieces = own_pieces();
    bytes_ += span.bytes;
    while (span.bytes > 0) {
        if (pieces.empty() || last_piece_bytes_ >= piece_bytes_) {
            pieces.emplace_back();
            last_piece_bytes_ = 0;
        }
        const std::size_t now = std::min(span.bytes, piece_bytes_ - last_piece_bytes_);
        put(pieces.back(), {span.destination, span.source, now});
        last_piece_bytes_ += now;
        span.destination += now;
        span.source += now;
        span.bytes -= now;
    }
}

void CopyPlan::add(std::size_t piece, CopySpan span) {
    CopyPieces& pieces = own_pieces();
    if (piece >= pieces.size()) {
        pieces.resize(piece + 1);
        last_piece_bytes_ = 0;
    }
    if (span.bytes > 0) {
        put(pieces[piece], span);
    }
    bytes_ += span.bytes;
    if (piece + 1 == pieces.size()) {
        last_piece_bytes_ += span.bytes;
    }
}

StagingRing::StagingRing(Address address, std::size_t slot_bytes, std::size_t slots)
    : address_(address), slot_bytes_(slot_bytes), num_slots_(slots) {
    if (address == 0 || slots == 0 || slot_bytes == 0 || address % 4 != 0 || slot_bytes % 4 != 0) {
        throw std::invalid_argument(
            "a staging ring needs an address, at least one slot and slots of a multiple of 4 "
            "bytes; got " +
            std::to_string(slots) + " slots of " + std::to_string(slot_bytes) + " bytes at " +
            std::to_string(address));
    }
    for (std::size_t slot = slots; slot > 0; --slot) {
        free_.push_back(slot - 1);
    }
}

std::size_t StagingRing::slots_free() const {
    const std::lock_guard lock(mutex_);
    return free_.size();
}

std::optional<std::size_t> StagingRing::try_acquire() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
        return std::nullopt;
    }
    const std::size_t slot = free_.back();
    free_.pop_back();
    return slot;
}

void StagingRing::release(std::size_t slot) {
    std::vector<std::shared_ptr<Waker>> wakers;
    {
        const std::lock_guard lock(mutex_);
        free_.push_back(slot);
        for (const auto& weak : wakers_) {
            if (auto waker = weak.lock()) {
                wakers.push_back(std::move(waker));
            }
        }
    }
    for (const auto& waker : wakers) {
        waker->wake();
    }
}

void StagingRing::subscribe(const std::shared_ptr<Waker>& waker) {
    const std::lock_guard lock(mutex_);
    std::erase_if(wakers_, [&](const auto& weak) {
        const auto known = weak.lock();
        return known == nullptr || known == waker;
    });
    wakers_.push_back(waker);
}

}  // namespace forebay
