#include "forebay/threads.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <cstring>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace forebay {

pid_t OwnThread::current_process() noexcept { return ::getpid(); }

void OwnThread::join() {
    if (!thread_.joinable()) {
        return;
    }
    if (in_its_process()) {
        thread_.join();
    } else {
        thread_.detach();
    }
}

std::string OwnThread::pin(const std::vector<int>& cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) {
        if (cpu < 0 || cpu >= CPU_SETSIZE) {
            return "processor " + std::to_string(cpu) + " is outside 0.." +
                   std::to_string(CPU_SETSIZE - 1);
        }
        CPU_SET(static_cast<std::size_t>(cpu), &set);
    }
    const int error = pthread_setaffinity_np(thread_.native_handle(), sizeof(set), &set);
    return error == 0 ? "" : "cannot pin a worker thread: " + std::string(std::strerror(error));
}

void OwnThread::prepare_thread(const std::string& name) {
    // The kernel keeps 15 characters.
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
#if defined(__x86_64__)
    // Power-on value of MXCSR: all exceptions masked, nearest even, no flush to zero.
    _mm_setcsr(0x1f80);
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" : : "r"(0UL));  // likewise
#endif
}

}  // namespace forebay
