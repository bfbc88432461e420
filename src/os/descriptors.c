/* RLIMIT_NOFILE. */
#include "os/descriptors.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/entries.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>

/* Counted where /proc cannot be read. */
enum { USUALLY_OPEN = 64 };

static bool count(void *context, const char *name) {
  (void)name;
  ++*(uint64_t *)context;
  return true;
}

static uint64_t open_now(void) {
  const even_error kept = *even_error_last();
  uint64_t found = 0;
  if (even_folder_each("/proc/self/fd", count, &found) != EVEN_OK) {
    (void)even_error_restore(&kept);
    found = USUALLY_OPEN;
  }
  return found;
}

even_status even_descriptors_raise(uint64_t needed, uint64_t spare, uint64_t *before, bool *tight) {
  struct rlimit limit;
  uint64_t least = open_now() + needed;
  uint64_t wanted = least + spare;
  *before = 0;
  *tight = false;
  if (even_os.getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return even_fail_errno(errno, "the limit on open files cannot be read");
  }
  if (limit.rlim_cur >= wanted) {
    return EVEN_OK;
  }
  if (limit.rlim_max < least) {
    return even_fail(EVEN_ERR_SYSTEM, "%llu open files are needed, and this process may have no more than %llu",
                     (unsigned long long)least, (unsigned long long)limit.rlim_max);
  }
  if (limit.rlim_max < wanted) {
    *tight = true;
    wanted = limit.rlim_max;
  }
  if (limit.rlim_cur >= wanted) {
    return EVEN_OK;
  }
  uint64_t was = limit.rlim_cur;
  limit.rlim_cur = wanted;
  if (even_os.setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return even_fail_errno(errno, "the limit on open files cannot be raised to %llu", (unsigned long long)wanted);
  }
  *before = was;
  return EVEN_OK;
}

bool even_descriptors_limit(uint64_t soft) {
  struct rlimit limit;
  if (even_os.getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return false;
  }
  limit.rlim_cur = soft;
  return even_os.setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

/* The lowest free number is the one that is given. */
void even_descriptors_fill_standard(void) {
  for (int fd = 0; fd <= 2; fd++) {
    if (even_os.fcntl(fd, F_GETFD, 0) < 0 && even_os.open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY, 0) < 0) {
      return;
    }
  }
}
