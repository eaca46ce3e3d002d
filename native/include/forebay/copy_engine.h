// The copy-engine table: the one seam between links and an accelerator's driver. A new
// accelerator is a new CopyEngine; links know nothing else about it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "forebay/threads.h"
#include "forebay/ticket.h"
#include "forebay/types.h"

namespace forebay {

// Calls in order: each lane thread calls enter_lane once, then reached, hold_stream and submit as
// pieces become ready. register_host and unregister_host may come from any thread at any time.
// Everything throws std::runtime_error with the driver's error name.
class CopyEngine {
public:
    virtual ~CopyEngine() = default;
    virtual void enter_lane() {}
    // Enqueues the copies of one piece on `stream`, in order; returns its end, or null when the
    // copies are already done.
    virtual std::shared_ptr<Fence> submit(Stream stream, const std::vector<CopySpan>& spans) = 0;
    // Work enqueued on `stream` from now on waits for `event`.
    virtual void hold_stream(Stream stream, Event event) = 0;
    // Whether everything before `event` is done; asked again by a lane that awaits it.
    virtual bool reached(Event event) = 0;
    // Page-locks host memory for fast transfers. No-ops where that has no meaning.
    virtual void register_host(Address address, std::size_t bytes) = 0;
    virtual void unregister_host(Address address) = 0;
};

using CopyEnginePtr = std::shared_ptr<CopyEngine>;

// Host to host: the lane thread copies, and has copied when submit returns.
class MemcpyEngine final : public CopyEngine {
public:
    std::shared_ptr<Fence> submit(Stream stream, const std::vector<CopySpan>& spans) override;
    void hold_stream(Stream stream, Event event) override;
    bool reached(Event event) override;
    void register_host(Address address, std::size_t bytes) override;
    void unregister_host(Address address) override;
};

// NVIDIA's driver API, found at run time: nothing of CUDA is needed to build. Keeps the device's
// primary context (the one that torch uses) alive.
CopyEnginePtr make_cuda_engine(int device);

// What a ScriptedEngine does to each piece.
struct Script {
    std::uint64_t seed = 0;
    std::uint64_t max_delay_us = 0;
    std::int64_t fail_at = -1;  // the n-th piece (from 0) fails; -1: none
    std::string fail_text = "scripted failure";
};

// For tests: hands every piece to `inner` after a pseudo-random delay, on a thread of its own, so
// that pieces in flight end out of order and a missing wait shows every time. An event is reached
// as late, counted from the first question.
class ScriptedEngine final : public CopyEngine {
public:
    ScriptedEngine(CopyEnginePtr inner, Script script);
    ~ScriptedEngine() override;
    ScriptedEngine(const ScriptedEngine&) = delete;
    ScriptedEngine& operator=(const ScriptedEngine&) = delete;

    void enter_lane() override;
    std::shared_ptr<Fence> submit(Stream stream, const std::vector<CopySpan>& spans) override;
    void hold_stream(Stream stream, Event event) override;
    bool reached(Event event) override;
    void register_host(Address address, std::size_t bytes) override;
    void unregister_host(Address address) override;

private:
    struct Delayed;
    class Timer;

    CopyEnginePtr inner_;
    std::shared_ptr<Timer> timer_;
    std::unique_ptr<OwnThread> thread_;
};

}  // namespace forebay
