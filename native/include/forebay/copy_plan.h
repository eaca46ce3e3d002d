// CopyPlan: which bytes go where, in pieces. StagingRing: the few slots through which sums pass.
// Plans hold addresses only; they may be built once and used for every step.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "forebay/ticket.h"
#include "forebay/types.h"

namespace forebay {

using CopyPieces = std::vector<std::vector<CopySpan>>;

class CopyPlan {
public:
    explicit CopyPlan(std::size_t piece_bytes);

    // Packs the copy behind what is there: pieces are filled up to piece_bytes, long copies are
    // split, copies that continue the last one are merged with it.
    void append(CopySpan span);
    // Places the copy in a piece of the caller's choice, whatever its size.
    void add(std::size_t piece, CopySpan span);

    std::size_t pieces() const noexcept { return shared_->pieces.size(); }
    std::size_t bytes() const noexcept { return bytes_; }
    // Unchanged by later append and add calls.
    std::shared_ptr<const CopyPieces> snapshot() const;

private:
    // Written by nobody once it has been seen from outside: the next change copies it.
    struct Shared {
        CopyPieces pieces;
        std::atomic<bool> seen{false};
    };

    CopyPieces& own_pieces();

    std::size_t piece_bytes_;
    std::size_t bytes_ = 0;
    std::size_t last_piece_bytes_ = 0;
    std::shared_ptr<Shared> shared_;
};

// Fixed host memory cut into equal slots. Thread-safe; several links may share one ring.
class StagingRing {
public:
    StagingRing(Address address, std::size_t slot_bytes, std::size_t slots);

    std::size_t slot_bytes() const noexcept { return slot_bytes_; }
    std::size_t slots() const noexcept { return num_slots_; }
    std::size_t slots_free() const;

    std::optional<std::size_t> try_acquire();
    void release(std::size_t slot);
    Address address_of(std::size_t slot) const noexcept { return address_ + slot * slot_bytes_; }
    // `waker` is told whenever a slot becomes free.
    void subscribe(const std::shared_ptr<Waker>& waker);

private:
    Address address_;
    std::size_t slot_bytes_;
    std::size_t num_slots_;
    mutable std::mutex mutex_;
    std::vector<std::size_t> free_;
    std::vector<std::weak_ptr<Waker>> wakers_;
};

}  // namespace forebay
