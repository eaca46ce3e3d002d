#include "forebay/threads.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
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

void OwnThread::give_way() noexcept {
    constexpr int kLevels = 10;  // a tenth of the processor beside a thread of usual niceness
    const auto self = static_cast<id_t>(::gettid());
    // Beyond the highest level the system takes the highest. That it refuses changes no result.
    static_cast<void>(
        ::setpriority(PRIO_PROCESS, self, ::getpriority(PRIO_PROCESS, self) + kLevels));
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
