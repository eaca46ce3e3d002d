// What the binding files share: handles, names of element types, interruptible waits. The
// bindings check and convert arguments and release the GIL, nothing more.
//
// Core objects are held through handles with plain std::shared_ptr, never through Python-owned
// ones: a lane or worker thread may drop the last reference, and must not need the interpreter.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "forebay/copy_engine.h"
#include "forebay/copy_plan.h"
#include "forebay/file_queue.h"
#include "forebay/link.h"
#include "forebay/pool.h"
#include "forebay/ticket.h"

namespace forebay::bind {

namespace nb = nanobind;

struct TicketHandle {
    TicketPtr it;
};

struct EngineHandle {
    CopyEnginePtr it;
};
struct MemcpyHandle : EngineHandle {};
struct CudaHandle : EngineHandle {};
struct ScriptedHandle : EngineHandle {};

struct RingHandle {
    std::shared_ptr<StagingRing> it;
};

struct PoolHandle {
    std::shared_ptr<Pool> it;
};

struct LinkHandle {
    std::shared_ptr<Link> it;
};

struct FileBackendHandle {
    FileBackendPtr it;
};
struct ThreadBackendHandle : FileBackendHandle {};
struct UringBackendHandle : FileBackendHandle {};
struct ScriptedBackendHandle : FileBackendHandle {};

struct FileSetHandle {
    FileSetPtr it;
};

struct FileQueueHandle {
    std::shared_ptr<FileQueue> it;
};

// What happens when the interpreter exits, for the whole process. Pools and links that are still
// open are closed before the memory that they work on goes away. Daemon threads that are inside
// the core never come back to the interpreter: taking the GIL while it ends would unwind the
// thread through C++ frames and abort the process (Python 3.14 makes all daemon threads hang so).
class ProcessEnd {
public:
    static ProcessEnd& instance();

    void add(const std::shared_ptr<Pool>& pool);
    void add(const std::shared_ptr<Link>& link);
    void add(const std::shared_ptr<FileQueue>& queue);
    // Called once, by the thread that ends the interpreter, without the GIL.
    void begin();

    // Around taking the GIL: enter() does not return once the interpreter ends.
    void enter() noexcept;
    void leave() noexcept;

private:
    std::vector<std::weak_ptr<Pool>> pools_;  // guarded by the GIL
    std::vector<std::weak_ptr<Link>> links_;
    std::vector<std::weak_ptr<FileQueue>> file_queues_;
    std::atomic<bool> ending_{false};
    std::atomic<std::thread::id> ending_thread_{};
    std::atomic<int> num_entering_{0};
};

// Gives the GIL away for its lifetime.
class WithoutGil {
public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() {
        ProcessEnd::instance().enter();
        PyEval_RestoreThread(state_);
        ProcessEnd::instance().leave();
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

private:
    PyThreadState* state_;
};

DType parse_dtype(const std::string& name);
std::vector<TicketPtr> tickets_of(const std::vector<TicketHandle>& handles);
// The kernel table that FOREBAY_KERNEL_LEVEL asks for; the best one when it is unset or empty.
const KernelTable& chosen_kernels();

// Repeats step(slice) without the GIL until it returns true; false on time-out (seconds, negative:
// none). Signals are looked at every 100 ms, so that Ctrl-C ends a wait.
template <typename Step>
bool wait_interruptibly(double timeout_s, Step step) {
    using Clock = std::chrono::steady_clock;
    using Seconds = std::chrono::duration<double>;
    constexpr std::chrono::nanoseconds slice = std::chrono::milliseconds(100);
    const auto begin = Clock::now();
    while (true) {
        std::chrono::nanoseconds now = slice;
        if (timeout_s >= 0) {
            const double left = timeout_s - Seconds(Clock::now() - begin).count();
            if (left < Seconds(slice).count()) {
                now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                    Seconds(left > 0 ? left : 0));
            }
        }
        bool reached = false;
        {
            const WithoutGil released;
            reached = step(now);
        }
        if (reached) {
            return true;
        }
        if (PyErr_CheckSignals() != 0) {
            throw nb::python_error();
        }
        if (timeout_s >= 0 && Seconds(Clock::now() - begin).count() >= timeout_s) {
            return false;
        }
    }
}

void bind_tickets(nb::module_& module);
void bind_numbers(nb::module_& module);
void bind_pool(nb::module_& module);
void bind_engines(nb::module_& module);
void bind_links(nb::module_& module);
void bind_files(nb::module_& module);

}  // namespace forebay::bind
