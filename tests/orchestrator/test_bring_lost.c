/* Copies that come back where a host has none any more, or does not come to the end of what it gets. */
#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "orchestrator/bring.h"
#include "orchestrator/bring_scene.h"
#include "orchestrator/copies.h"
#include "orchestrator/resume.h"
#include "os/clock.h"
#include "os/signals.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* The hosts here take no copy: what is on its way there does not come to its end. */
static void a_copy_that_does_not_come_to_its_end_is_not_waited_for_without_end(void **state) {
  (void)state;
  const even_bring_back_wish wish = bring_scene_wish();
  char *path = NULL;
  bring_scene_save(at.folder, 3);
  at.job.alive = 1;
  even_copies_tick(&at.job);
  assert_non_null(even_copies_coming(at.hosts.copies));
  at.job.alive = 0;
  bring_scene_save(at.folder, 2);
  bring_scene_read_order(at.folder, 2, at.after);
  bring_scene_assert_brings(&wish, NULL);
  assert_true(bring_scene_was_told(
      "warning: host host1 may have a newer checkpoint than this one, but what was on its way there "
      "has not come to its end within 300 s"));
  assert_int_equal(even_checkpoint_remove(scratch_path("leader/step-3")), EVEN_OK);
  at.after[0] = '\0';
  assert_int_equal(bring_scene_look(&wish, &path), EVEN_ERR_PEER_LOST);
  assert_non_null(strstr(even_error_last()->what, "has not come to its end within 300 s: its disk may hang"));
  bring_scene_save(at.sides[1].disk, 3); /* it has, but does not say it */
  bring_scene_assert_brings(&wish, scratch_path("leader/step-3"));
  for (size_t i = 1; i < STAR_HOSTS; i++) {
    even_bring_drop(&at.agents[i]);
  }
}

/* Nor is one that gets what a restart begins from: it is lost, as one that stands still. */
static void a_host_that_does_not_write_what_it_gets_is_given_up(void **state) {
  (void)state;
  bring_scene_save(at.folder, 3);
  even_text_add(&at.job.resume, scratch_path("leader/step-3"));
  const uint64_t began_ns = even_clock_ns();
  assert_int_equal(even_bring_to_all(&at.job), EVEN_ERR_PEER_LOST);
  assert_in_range(even_clock_ns() - began_ns, EVEN_BRING_WRITING_NS, EVEN_BRING_WRITING_NS + 60 * UINT64_C(1000000000));
  assert_non_null(strstr(even_error_last()->what,
                         "host host1 is lost: what was sent there of step-3 has not come to its end within 300 s: its "
                         "disk may hang"));
  assert_int_equal(even_bring_to_those_here(&at.job), EVEN_OK); /* nobody is, by now */
  for (size_t i = 1; i < STAR_HOSTS; i++) {
    assert_null(at.agents[i].link);
    even_bring_drop(&at.agents[i]);
  }
  even_text_free(&at.job.resume);
}

/* The agent has sent step-3 to host 2, and, or, to host 1, and another one goes on from what it knew. */
static void have_sent(bool to_both) {
  even_copies_left left = {.held[0] = {.host = "host2", .order = "1"}};
  (void)snprintf(left.held[0].folder, sizeof left.held[0].folder, "%s", scratch_path("disk2/step-3"));
  if (to_both) {
    left.held[1] = (even_copies_left_copy){.host = "host1", .order = "1"};
    (void)snprintf(left.held[1].folder, sizeof left.held[1].folder, "%s", scratch_path("disk1/step-3"));
  }
  assert_int_equal(even_copies_take(&at.job, &left), EVEN_OK);
}

/* It would be missed for ever. */
static void a_copy_that_its_host_has_no_more_does_not_end_the_job(void **state) {
  (void)state;
  have_sent(false);
  at.sides[2].deaf = true; /* it says nothing of it */
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_ERR_PEER_LOST);
  at.sides[2].deaf = false;
  assert_int_equal(mkdir(scratch_path("disk2"), 0700), 0);
  assert_int_equal(mkdir(scratch_path("disk2/step-3"), 0700), 0); /* something of it is left */
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_ERR_NOT_FOUND);
  assert_int_equal(rmdir(scratch_path("disk2/step-3")), 0);
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_OK);
  assert_int_equal(at.job.resume.length, 0);
  assert_true(bring_scene_was_told("warning: host host2 had a copy of step-3 ("));
  assert_null(even_copies_newest(&at.job));
}

/* Nor of two: as long as one that is lost, or a host that says nothing, may have its own the job is not begun anew. */
static void copies_that_all_hosts_have_no_more_do_not_end_the_job(void **state) {
  (void)state;
  at.hosts.params.copies = 2;
  have_sent(true);
  even_link *link = at.agents[2].link;
  at.agents[2].link = NULL; /* lost before it was asked */
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, "for host host2 has a copy of step-3"));
  assert_true(bring_scene_was_told("warning: host host1 had a copy of step-3 (")); /* it said so */
  assert_false(bring_scene_was_told("warning: host host2"));
  at.agents[2].link = link;
  assert_int_equal(even_job_find_resume(&at.job, true), EVEN_OK);
  assert_int_equal(at.job.resume.length, 0);
  assert_true(bring_scene_was_told("warning: host host2 had a copy of step-3 ("));
}

int main(void) {
#define LOST_TEST(name) cmocka_unit_test_setup_teardown(name, bring_scene_set_up, bring_scene_tear_down)
  const struct CMUnitTest tests[] = {
      LOST_TEST(a_copy_that_its_host_has_no_more_does_not_end_the_job),
      LOST_TEST(copies_that_all_hosts_have_no_more_do_not_end_the_job),
      LOST_TEST(a_copy_that_does_not_come_to_its_end_is_not_waited_for_without_end),
      LOST_TEST(a_host_that_does_not_write_what_it_gets_is_given_up),
  };
  struct sigaction pipe_before; /* as agents have it */
  if (even_signals_pipe_ignore(&pipe_before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
