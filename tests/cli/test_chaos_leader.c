/* How `evenstep chaos` hears a leader that is no child of it: by its log, each byte of which is read once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/chaos.h"
#include "os/calls.h"
#include "support/fault.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINES = 2000 };

static char folder[] = "/tmp/evenstep-leader-XXXXXX";
static bool lives;
static long opened;
static size_t bytes_read;

bool even_chaos_lives(const even_chaos_process *process) {
  (void)process;
  return lives;
}

static int counted_open(const char *path, int flags, mode_t mode) {
  opened++;
  return even_os_real.open(path, flags, mode);
}

static ssize_t counted_read(int fd, void *buffer, size_t bytes) {
  ssize_t got = even_os_real.read(fd, buffer, bytes);
  bytes_read += got > 0 ? (size_t)got : 0;
  return got;
}

static ssize_t counted_pread(int fd, void *buffer, size_t bytes, off_t offset) {
  ssize_t got = even_os_real.pread(fd, buffer, bytes, offset);
  bytes_read += got > 0 ? (size_t)got : 0;
  return got;
}

static const char *path_of(const char *name) {
  static char path[128];
  (void)snprintf(path, sizeof path, "%s%s", folder, name);
  return path;
}

static int set_up(void **state) {
  (void)state;
  if (mkdtemp(folder) == NULL || mkdir(path_of("/logs"), 0700) != 0) {
    return -1;
  }
  fault_reset();
  even_os.open = counted_open;
  even_os.read = counted_read;
  even_os.pread = counted_pread;
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  fault_reset();
  (void)unlink(path_of("/logs/leader.log"));
  (void)rmdir(path_of("/logs"));
  return rmdir(folder);
}

/* Returns how many bytes. */
static size_t say(const char *words) {
  FILE *log = fopen(path_of("/logs/leader.log"), "a");
  assert_non_null(log);
  assert_true(fputs(words, log) >= 0);
  assert_int_equal(fclose(log), 0);
  return strlen(words);
}

static void each_word_is_read_once(void **state) {
  even_chaos_job job = {.succeeded = true};
  const char *line = NULL;
  size_t said = 0;
  char words[32];
  (void)state;
  even_text_add(&job.folder, folder);
  lives = true;
  assert_int_equal(even_chaos_hear_leader(&job, 0, &line), EVEN_ERR_TIMEOUT); /* there is no log yet */
  opened = 0;
  for (int i = 0; i < LINES; i++) {
    (void)snprintf(words, sizeof words, "line %d\n", i);
    said += say(words);
  }
  said += say("half");
  for (int i = 0; i < LINES; i++) {
    (void)snprintf(words, sizeof words, "line %d", i);
    assert_int_equal(even_chaos_hear_leader(&job, 0, &line), EVEN_OK);
    assert_string_equal(line, words);
  }
  assert_int_equal(opened, 1);
  assert_int_equal(even_chaos_hear_leader(&job, 0, &line), EVEN_ERR_TIMEOUT);
  said += say(" a line\nlast words");
  lives = false;
  assert_int_equal(even_chaos_hear_leader(&job, 0, &line), EVEN_OK);
  assert_string_equal(line, "half a line");
  assert_int_equal(even_chaos_hear_leader(&job, 0, &line), EVEN_OK);
  assert_null(line);
  assert_non_null(strstr(job.complaint, "half a line\nlast words"));
  assert_int_equal(bytes_read, said);
  job.succeeded = false; /* nobody is to be ended */
  even_chaos_end_leader(&job);
  even_text_free(&job.agent.complaint);
  even_text_free(&job.folder);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(each_word_is_read_once, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
