// FileBackend: how blocks reach the kernel. The one seam between the file queue and the system: a
// new way to do input and output is a new backend, and the queue's tests run on each of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "forebay/types.h"

namespace forebay {

enum class FileAction { read, write };

// One system call's worth of work. The memory belongs to the caller until the block has completed.
struct FileBlock {
    FileAction action = FileAction::read;
    int descriptor = -1;
    Address address = 0;
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
    std::uint64_t tag = 0;  // the caller's, handed back
};

// `result` is what the system call returned: bytes that were transferred, or a negative errno.
struct FileCompletion {
    std::uint64_t tag = 0;
    std::int64_t result = 0;
};

// Calls in order: the queue's thread alone submits and waits; interrupt() comes from any thread.
// Every block that was submitted completes exactly once. A backend is destroyed when nothing is
// under way.
class FileBackend {
public:
    virtual ~FileBackend() = default;
    // May hold the block back until wait(), so that several go to the kernel at once.
    virtual void submit(const FileBlock& block) = 0;
    // Hands over what submit() held back.
    virtual void flush() = 0;
    // Flushes, then blocks without spinning until something completed or interrupt() was called
    // since the last wait; appends what completed. Throws std::runtime_error when the backend
    // itself is broken.
    virtual void wait(std::vector<FileCompletion>& completed) = 0;
    virtual void interrupt() noexcept = 0;
};

using FileBackendPtr = std::shared_ptr<FileBackend>;

// One thread per block in flight, with pread and pwrite: works everywhere.
FileBackendPtr make_thread_backend(std::size_t threads);

// io_uring, by system calls alone: no library is needed to build or to run. Throws
// std::runtime_error with the reason where the kernel has none or forbids it.
FileBackendPtr make_uring_backend(std::size_t depth);

// What a scripted backend does; block numbers count from 0 over all submissions.
struct FileScript {
    std::uint64_t seed = 0;
    std::uint64_t max_delay_us = 0;  // completions are late by up to this, and out of order
    std::int64_t fail_at = -1;
    int fail_errno = 5;          // EIO
    std::int64_t short_at = -1;  // this block transfers only `short_bytes`
    std::size_t short_bytes = 0;
};

// For tests: real bytes through `inner`, late, out of order, short or failed by the script.
FileBackendPtr make_scripted_backend(FileBackendPtr inner, FileScript script);

}  // namespace forebay
