/* The file system says that it is NFS; clock and sleep are made up. */
#include "os/two_hosts.h"

#include "base/stop.h"
#include "os/calls.h"
#include "support/fault.h"
#include "support/nfs.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

char folder[64];
char sign[96];
char told[512];

/* ---- made-up calls ---- */

uint64_t clock_ns;
uint64_t suspended_ns; /* the computer slept, and CLOCK_MONOTONIC with it */
uint64_t slept_ns;
void (*while_asleep)(void);

static int made_up_clock(clockid_t clock, struct timespec *out) {
  uint64_t ns = clock_ns + (clock == CLOCK_BOOTTIME ? suspended_ns : 0);
  *out = (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  return 0;
}

static int made_up_sleep(const struct timespec *time) {
  uint64_t ns = (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec;
  clock_ns += ns;
  slept_ns += ns;
  if (while_asleep != NULL) {
    while_asleep();
  }
  return 0;
}

void play(void) {
  even_os.fstatfs = statfs_of_nfs;
  even_os.clock_gettime = made_up_clock;
  even_os.nanosleep = made_up_sleep;
}

void host(const char *name) {
  assert_int_equal(setenv("EVENSTEP_HOST_ID", name, 1), 0);
}

int two_hosts_make(void **state) {
  (void)state;
  (void)strcpy(folder, "/tmp/evenstep-lease-XXXXXX");
  if (mkdtemp(folder) == NULL) {
    return -1;
  }
  (void)snprintf(sign, sizeof sign, "%s/%s", folder, EVEN_LEASE_SIGN);
  clock_ns = 1000000000000u;
  suspended_ns = 0;
  slept_ns = 0;
  while_asleep = NULL;
  told[0] = '\0';
  play();
  host("a");
  return 0;
}

int two_hosts_end(void **state) {
  char command[128];
  (void)state;
  fault_reset();
  even_stop_when(NULL);
  (void)unsetenv("EVENSTEP_HOST_ID");
  (void)snprintf(command, sizeof command, "rm -rf %s", folder);
  return system(command);
}

static void tell(void *context, const char *words) {
  (void)context;
  (void)snprintf(told, sizeof told, "%s", words);
}

even_lease_params params_of(const char *owner, uint64_t turn) {
  return (even_lease_params){.folder = folder, .owner = owner, .turn = turn, .patient = true, .tell = tell};
}

even_lease *taken(const char *owner, uint64_t turn) {
  even_lease *lease = NULL;
  const even_lease_params params = params_of(owner, turn);
  assert_int_equal(even_lease_take(&params, &lease), EVEN_OK);
  assert_non_null(lease);
  return lease;
}

even_status try_to_take(const even_lease_params *params) {
  even_lease *lease = NULL;
  even_status status = even_lease_take(params, &lease);
  assert_true(status == EVEN_OK || lease == NULL);
  even_lease_release(lease);
  return status;
}

/* Times of a file are coarse: they move by seconds here. */
void move_times(void) {
  static time_t second = 2000000000;
  second++;
  const struct timespec times[2] = {{second, 0}, {second, 0}};
  assert_int_equal(utimensat(AT_FDCWD, sign, times, 0), 0);
}

int entries(void) {
  int count = 0;
  DIR *stream = opendir(folder);
  assert_non_null(stream);
  for (struct dirent *each = readdir(stream); each != NULL; each = readdir(stream)) {
    count += each->d_name[0] != '.';
  }
  (void)closedir(stream);
  return count;
}
