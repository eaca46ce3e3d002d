// The kinds of work that a pool does: update, fold, square-sum, checksum.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "forebay/pool.h"
#include "forebay/squares.h"
#include "forebay/update.h"

namespace forebay {

// A span's elements [begin, end), or its tree blocks for a square-sum.
struct SpanChunk {
    std::size_t span = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
};

class UpdateWork final : public Work {
public:
    UpdateWork(const KernelTable& table, UpdatePass pass);
    std::size_t pieces() const noexcept { return pass_.pieces(); }
    std::size_t chunks() const noexcept override { return pass_.chunks().size(); }
    std::size_t piece_of(std::size_t chunk) const noexcept override {
        return pass_.chunks()[chunk].piece;
    }
    void begin(Ticket& ticket) override;
    void run(std::size_t chunk, Ticket& ticket) override;

private:
    const KernelTable& table_;
    UpdatePass pass_;
    std::unique_ptr<std::atomic<std::size_t>[]> left_in_piece_;
};

class FoldWork final : public Work {
public:
    // Sources are multiplied by `scale` before they are added.
    FoldWork(const KernelTable& table, std::vector<FoldSpan> spans, DType dtype, bool first,
             float scale);
    std::size_t chunks() const noexcept override { return chunks_.size(); }
    void run(std::size_t chunk, Ticket& ticket) override;

private:
    const KernelTable& table_;
    std::vector<FoldSpan> spans_;
    DType dtype_;
    bool first_;
    float scale_;
    std::vector<SpanChunk> chunks_;
};

class SquareWork final : public Work {
public:
    SquareWork(const KernelTable& table, std::vector<ElementSpan> spans, DType dtype);
    std::size_t chunks() const noexcept override { return chunks_.size(); }
    void run(std::size_t chunk, Ticket& ticket) override;
    void end(Ticket& ticket) override;

private:
    const KernelTable& table_;
    std::vector<ElementSpan> spans_;
    DType dtype_;
    std::vector<SpanChunk> chunks_;
    std::vector<std::vector<double>> block_sums_;  // one list per span
};

class ChecksumWork final : public Work {
public:
    ChecksumWork(const KernelTable& table, ChecksumRequest request);
    std::size_t chunks() const noexcept override { return blocks_; }
    void run(std::size_t chunk, Ticket& ticket) override;

private:
    const KernelTable& table_;
    ChecksumRequest request_;
    std::size_t blocks_;
};

}  // namespace forebay
