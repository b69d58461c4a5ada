// Preloaded into a process whose name starts with valkey-server: its real-time clock is ahead by the seconds in the file
// that TINSMITH_SOAK_CLOCK names (one int64). Every other process, and every other clock, is left alone.
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t kNone = 0;
static const volatile int64_t *ahead = &kNone;

__attribute__((constructor)) static void open_clock() {
  const char *path = getenv("TINSMITH_SOAK_CLOCK");
  if (!path || strncmp(program_invocation_short_name, "valkey-server", 13) != 0) return;
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) abort();
  void *found = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (found == MAP_FAILED) abort();
  ahead = static_cast<const volatile int64_t *>(found);
  close(file);
}

// The system call itself: the library's function of this name is the one below.
extern "C" int clock_gettime(clockid_t id, struct timespec *now) noexcept {
  long failed = syscall(SYS_clock_gettime, id, now);
  if (!failed && id == CLOCK_REALTIME) now->tv_sec += *ahead;
  return static_cast<int>(failed);
}

extern "C" int gettimeofday(struct timeval *now, void *) noexcept {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

extern "C" time_t time(time_t *now) noexcept {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (now) *now = exact.tv_sec;
  return exact.tv_sec;
}
