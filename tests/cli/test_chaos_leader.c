/* How `evenstep chaos` hears a leader that is no child of it: by its log, each byte of which is read once; and what it
 * makes of one whose link it has cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/chaos.h"
#include "os/calls.h"
#include "os/clock.h"
#include "support/clock_ahead.h"
#include "support/fault.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINES = 2000 };

static char folder[40];
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
  (void)snprintf(folder, sizeof folder, "/tmp/evenstep-leader-XXXXXX");
  if (mkdtemp(folder) == NULL || mkdir(path_of("/logs"), 0700) != 0) {
    return -1;
  }
  fault_reset();
  opened = 0;
  bytes_read = 0;
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

/* ---- a leader whose link was cut ---- */

enum { CUT_OFF = 4711 };

typedef struct cut {
  even_chaos_job job;
  even_chaos_done done;
} cut;

/* The link is up again. */
static void cut_leader(cut *at) {
  *at = (cut){.job = {.led_before = CUT_OFF}, .done = {.injected = true, .words = "the link of host here"}};
  even_text_add(&at->job.folder, folder);
  even_text_add(&at->job.agent.complaint, "said before the cut: the majority of the hosts is heard again\n");
  at->done.heard = at->job.agent.complaint.length;
  at->done.at_ns = even_clock_ns();
  at->job.leader_cut = &at->done;
  at->job.done = &at->done;
  at->job.next = 1;
}

static void free_cut(cut *at) {
  even_text_free(&at->job.agent.complaint);
  even_text_free(&at->job.folder);
  even_text_free(&at->job.led_folder);
}

static void own(const char *beside, long pid) {
  char name[32];
  (void)snprintf(name, sizeof name, "%s", beside);
  (void)mkdir(path_of(name), 0700);
  (void)snprintf(name, sizeof name, "%s/agent.json", beside);
  FILE *file = fopen(path_of(name), "w");
  assert_non_null(file);
  assert_true(fprintf(file, "{\"pid\": %ld}", pid) > 0);
  assert_int_equal(fclose(file), 0);
}

static void disown(const char *beside) {
  char name[32];
  (void)snprintf(name, sizeof name, "%s/agent.json", beside);
  assert_int_equal(unlink(path_of(name)), 0);
  if (beside[0] != '\0') {
    assert_int_equal(rmdir(path_of(beside)), 0);
  }
}

/* It has the first one's folder for as long as it lives; the next one's is beside it. */
static void one_that_is_cut_off_ends_when_it_hears_of_the_next(void **state) {
  cut at;
  (void)state;
  own("", CUT_OFF);
  cut_leader(&at);
  even_chaos_leader_look(&at.job);
  assert_int_equal(at.job.leader.pid, 0); /* its own word counts for nothing */
  own(".1", (long)getpid());
  even_chaos_leader_look(&at.job);
  assert_int_equal(at.job.leader.pid, getpid());
  assert_string_equal(even_chaos_led_folder(&at.job), path_of(".1"));
  disown(".1"); /* it may have come to its end by then */
  even_text_add(&at.job.agent.complaint,
                "evenstep: another host (10.79.1.2) leads this job since generation 2: its part has ended\n  fix: …\n");
  assert_true(even_chaos_is_superseded(&at.job));
  assert_false(at.done.broken);
  even_text_free(&at.job.agent.complaint);
  assert_int_equal(even_chaos_await_leader(&at.job, CUT_OFF), EVEN_OK);
  assert_true(at.job.succeeded && at.job.leader_cut == NULL && at.job.exit_code == -1);
  assert_non_null(strstr(at.done.words, "; process "));
  assert_int_equal(at.done.tended, EVEN_CHAOS_NOT_TENDED); /* it was not killed */
  free_cut(&at);
  cut_leader(&at);
  at.job.leader.pid = getpid();
  even_text_add(&at.job.agent.complaint, "evenstep: no room\n");
  assert_true(even_chaos_is_superseded(&at.job));
  assert_true(at.done.broken);
  free_cut(&at);
  cut_leader(&at);
  at.job.exit_code = 0; /* the training had come to its end */
  assert_false(even_chaos_is_superseded(&at.job));
  assert_false(at.done.broken);
  free_cut(&at);
  disown("");
}

static void one_that_hears_the_others_again_says_so(void **state) {
  static const char *const says[] = {"evenstep: the majority of the hosts is heard again\n",
                                     "not heard): the ranks here were held meanwhile, and go on\n"};
  cut at;
  (void)state;
  for (size_t i = 0; i < 2; i++) {
    cut_leader(&at);
    even_chaos_leader_look(&at.job); /* not by what it had said before */
    assert_non_null(at.job.leader_cut);
    even_text_add(&at.job.agent.complaint, says[i]);
    even_chaos_leader_look(&at.job);
    assert_null(at.job.leader_cut);
    assert_false(at.done.broken);
    assert_non_null(strstr(at.done.words, "it leads again"));
    free_cut(&at);
  }
  cut_leader(&at);
  even_chaos_leader_look(&at.job);
  clock_ahead_set(61000000000u);
  even_chaos_leader_look(&at.job);
  assert_true(at.job.leader_cut == NULL && at.done.broken);
  assert_non_null(strstr(at.done.words, "it did not say that it was cut off"));
  free_cut(&at);
  clock_ahead_set(0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(one_that_is_cut_off_ends_when_it_hears_of_the_next, set_up, tear_down),
      cmocka_unit_test_setup_teardown(one_that_hears_the_others_again_says_so, set_up, tear_down),
      cmocka_unit_test_setup_teardown(each_word_is_read_once, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
