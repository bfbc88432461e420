/* Checkpoints that are kept at another place, too: when they are asked for, and what follows. */
#include "base/alloc.h"
#include "base/fail.h"
#include "job_fixture.h"
#include "os/calls.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

/* A place that answers once as the test says. */
typedef struct place {
  job_fixture job;
  const char *writes; /* the checkpoint that is fetched, NULL: there is none */
  bool fails;
  int fails_more; /* after it has answered once, or failed, so often */
  bool ticked;    /* the job had its turn while it was asked */
  int asked;
  char said[512]; /* of the last wish: URL|any or later|anybody or own|LINEAGE|until or nothing */
} place;

static even_status fetch(void *context, const even_agent_wish *wish, char **path) {
  place *one = context;
  char name[128];
  char whole[256];
  one->asked++;
  assert_non_null(wish->meanwhile);
  one->ticked = false;
  wish->meanwhile(wish->meanwhile_context);
  assert_true(one->ticked);
  *path = NULL;
  assert_string_equal(wish->folder, one->job.checkpoints);
  (void)snprintf(one->said, sizeof one->said, "%s|%s|%s|%s|%s", wish->url == NULL ? "" : wish->url,
                 wish->after[0] == '\0' ? "any" : "later", wish->job[0] == '\0' ? "anybody" : "own", wish->lineage,
                 wish->until[0] == '\0' ? "" : "until");
  if (one->fails || (one->asked > 1 && one->fails_more-- > 0)) {
    return even_fail(EVEN_ERR_INPUT, "the far place does not answer");
  }
  if (one->writes == NULL) {
    return EVEN_OK;
  }
  (void)snprintf(name, sizeof name, "checkpoints/%s", one->writes);
  (void)snprintf(whole, sizeof whole, "%s/%s", one->job.checkpoints, one->writes);
  (void)mkdir(one->job.checkpoints, 0777);
  job_fixture_write_checkpoint_of(&one->job, name, "mine", "the job before");
  one->writes = NULL;
  return even_duplicate(whole, path);
}

static void on_tick(job_fixture *job) {
  ((place *)job)->ticked = true; /* its first member */
}

/* Time passes at once. */
static int no_sleep(const struct timespec *time) {
  (void)time;
  return 0;
}

static int open_place(void **state) {
  place *one = calloc(1, sizeof *one);
  assert_non_null(one);
  job_fixture_open(&one->job);
  one->job.elsewhere = (even_agent_elsewhere){.context = one, .kept = true, .fetch = fetch};
  one->job.on_tick = on_tick;
  *state = one;
  return 0;
}

static const char *const says_what_it_has = "echo resume=${EVENSTEP_RESUME##*/}";

static void a_fresh_disk_takes_the_far_one(void **state) {
  place *one = *state;
  int code = -1;
  one->job.resume = "auto";
  one->writes = "step-7";
  assert_int_equal(job_fixture_run(&one->job, says_what_it_has, &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(job_fixture_saw(&one->job, "line 1 resume=step-7|"));
  assert_string_equal(one->said, "|any|anybody||");
}

static void what_is_here_and_newer_is_taken(void **state) {
  place *one = *state;
  int code = -1;
  one->job.resume = "auto";
  assert_int_equal(mkdir(one->job.checkpoints, 0777), 0);
  job_fixture_write_checkpoint_of(&one->job, "checkpoints/step-4", "mine", "the job before");
  assert_int_equal(job_fixture_run(&one->job, says_what_it_has, &code), EVEN_OK);
  assert_true(job_fixture_saw(&one->job, "line 0 resume=step-4|"));
  assert_string_equal(one->said, "|later|anybody||");
}

static void an_older_one_here_is_not(void **state) {
  place *one = *state;
  int code = -1;
  one->job.resume = "auto";
  one->writes = "step-9";
  assert_int_equal(mkdir(one->job.checkpoints, 0777), 0);
  job_fixture_write_checkpoint_of(&one->job, "checkpoints/step-4", "mine", "the job before");
  assert_int_equal(job_fixture_run(&one->job, says_what_it_has, &code), EVEN_OK);
  assert_true(job_fixture_saw(&one->job, "line 0 resume=step-9|"));
}

static void nobody_is_asked_who_was_not_named(void **state) {
  place *one = *state;
  int code = -1;
  one->job.resume = "auto";
  one->job.elsewhere.kept = false;
  assert_int_equal(job_fixture_run(&one->job, says_what_it_has, &code), EVEN_OK);
  assert_true(job_fixture_saw(&one->job, "line 0 resume=|"));
  assert_int_equal(one->asked, 0);
}

/* Training would begin anew otherwise, though something is there. */
static void a_place_that_does_not_answer(void **state) {
  place *one = *state;
  int code = -1;
  one->job.resume = "auto";
  one->fails = true;
  assert_int_equal(job_fixture_run(&one->job, says_what_it_has, &code), EVEN_ERR_INPUT);
  assert_non_null(strstr(even_error_last()->what, "--resume auto: the far place does not answer"));
  assert_false(job_fixture_saw(&one->job, "started"));
  assert_int_equal(mkdir(one->job.checkpoints, 0777), 0);
  job_fixture_write_checkpoint_of(&one->job, "checkpoints/step-4", "mine", "the job before");
  assert_int_equal(job_fixture_run(&one->job, says_what_it_has, &code), EVEN_OK);
  assert_true(
      job_fixture_saw(&one->job, "notice warning: the far place does not answer; the job goes on from what is "));
  assert_true(job_fixture_saw(&one->job, "line 0 resume=step-4|"));
}

/* Attempt 0 dies; `lost`: with all that is on its disk. */
static const char *script_of(bool lost, char out[512]) {
  (void)snprintf(out, 512,
                 "echo resume=${EVENSTEP_RESUME##*/}; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; "
                 "[ $RANK = 0 ] && sleep 600; %s kill -9 $$",
                 lost ? "rm -r $FOLDER/checkpoints;" : "");
  return out;
}

static void a_restart_after_a_lost_disk(void **state) {
  place *one = *state;
  int code = -1;
  char script[512];
  one->job.resume = "auto";
  one->job.max_restarts = 1;
  assert_int_equal(mkdir(one->job.checkpoints, 0777), 0);
  job_fixture_write_checkpoint_of(&one->job, "checkpoints/step-4", "mine", "the job before");
  assert_int_equal(job_fixture_run(&one->job, script_of(false, script), &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_int_equal(one->asked, 1); /* at the beginning; a restart has what it wrote */
  even_text_clear(&one->job.seen);
  assert_int_equal(job_fixture_run(&one->job, script_of(true, script), &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_int_equal(one->asked, 3);
  assert_string_equal(one->said, "|any|own|mine|until");
  assert_true(job_fixture_saw(&one->job, "line 1 resume=step-4|"));
  assert_true(job_fixture_saw(&one->job, "line 1 resume=|")); /* nothing is there either */
}

/* Its checkpoints are lost here, and may be there: a restart does not make their steps again unasked. */
static void steps_are_not_given_up_for_a_place_that_does_not_answer(void **state) {
  place *one = *state;
  int code = -1;
  char script[512];
  one->job.resume = "auto";
  one->job.max_restarts = 1;
  one->fails = true;
  assert_int_equal(mkdir(one->job.checkpoints, 0777), 0);
  job_fixture_write_checkpoint_of(&one->job, "checkpoints/step-4", "mine", "the job before");
  assert_int_equal(job_fixture_run(&one->job, script_of(true, script), &code), EVEN_ERR_INPUT);
  assert_non_null(strstr(even_error_last()->what, "no checkpoint of the job is left here, and it is not begun anew"));
  assert_non_null(strstr(even_error_last()->what, "the far place does not answer"));
  assert_true(job_fixture_saw(&one->job, "notice the job ends: once that place answers, --name NAME --resume auto"));
  assert_false(job_fixture_saw(&one->job, "attempt 1|"));
  assert_int_equal(one->asked, 2);
}

static void it_is_asked_again_for_a_while(void **state) {
  place *one = *state;
  int code = -1;
  char script[512];
  one->job.resume = "auto";
  one->job.max_restarts = 1;
  one->job.elsewhere.patience_seconds = 1e6;
  one->fails_more = 3;
  assert_int_equal(mkdir(one->job.checkpoints, 0777), 0);
  job_fixture_write_checkpoint_of(&one->job, "checkpoints/step-4", "mine", "the job before");
  even_os.nanosleep = no_sleep;
  assert_int_equal(job_fixture_run(&one->job, script_of(true, script), &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_int_equal(one->asked, 5);
  assert_true(job_fixture_saw(&one->job, "does not answer; that place is asked again for 1e+06 s|"));
}

static void joins_and_loses_its_disk(job_fixture *job, int rank, const char *text) {
  (void)text;
  job_fixture_event(job, rank, EVEN_EVENT_JOINED);
}

/* Of a job that begins: where its ranks had met there may be a checkpoint, else there is none to lose. */
static void what_never_trained_begins_anew(void **state) {
  place *one = *state;
  int code = -1;
  char script[512];
  one->job.max_restarts = 1;
  one->fails = true;
  assert_int_equal(mkdir(one->job.checkpoints, 0777), 0);
  assert_int_equal(job_fixture_run(&one->job, script_of(true, script), &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_true(
      job_fixture_saw(&one->job, "notice warning: the far place does not answer; the job goes on from what is "));
  assert_true(job_fixture_saw(&one->job, "attempt 1|"));
  even_text_clear(&one->job.seen);
  assert_int_equal(mkdir(one->job.checkpoints, 0777), 0);
  one->job.on_line = joins_and_loses_its_disk;
  assert_int_equal(job_fixture_run(&one->job, script_of(true, script), &code), EVEN_ERR_INPUT);
  assert_false(job_fixture_saw(&one->job, "attempt 1|"));
}

/* What an attempt writes is newer than all that it goes on from, and than what attempts before it may have written. */
static void attempts_have_their_turns(void **state) {
  place *one = *state;
  int code = -1;
  one->job.resume = "auto";
  one->job.max_restarts = 2;
  one->job.elsewhere.kept = false;
  static const char *const script =
      "echo turn=$EVENSTEP_CHECKPOINT_TURN; [ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit "
      "0; [ $RANK = 0 ] && sleep 600; kill -9 $$";
  assert_int_equal(job_fixture_run(&one->job, script, &code), EVEN_OK);
  assert_true(job_fixture_saw(&one->job, "line 1 turn=1|") && job_fixture_saw(&one->job, "line 1 turn=2|") &&
              job_fixture_saw(&one->job, "line 1 turn=3|"));
  assert_int_equal(mkdir(one->job.checkpoints, 0777), 0);
  job_fixture_write_checkpoint_in(&one->job, "checkpoints/step-4",
                                  "{\"step\":4,\"lineage\":\"mine\",\"job\":\"another\",\"order\":[7,1,3]}");
  one->job.resume = NULL; /* what lies there is none of its */
  even_text_clear(&one->job.seen);
  assert_int_equal(job_fixture_run(&one->job, script, &code), EVEN_OK);
  assert_true(job_fixture_saw(&one->job, "line 1 turn=8|") && job_fixture_saw(&one->job, "line 1 turn=9|") &&
              job_fixture_saw(&one->job, "line 1 turn=10|"));
}

static void the_same_where_something_is_there(void **state) {
  place *one = *state;
  int code = -1;
  char script[512];
  one->job.max_restarts = 1;
  one->writes = "step-6";
  assert_int_equal(mkdir(one->job.checkpoints, 0777), 0);
  assert_int_equal(job_fixture_run(&one->job, script_of(true, script), &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_int_equal(one->asked, 1);
  assert_string_equal(one->said, "|any|own||");
  assert_true(job_fixture_saw(&one->job, "line 1 resume=step-6|"));
}

static void a_named_place(void **state) {
  place *one = *state;
  int code = -1;
  char script[512];
  one->job.resume = "sftp://me:secret@host/run";
  one->job.max_restarts = 1;
  assert_int_equal(job_fixture_run(&one->job, says_what_it_has, &code), EVEN_ERR_NOT_FOUND);
  assert_string_equal(even_error_last()->what, "--resume: sftp://host/run holds no whole checkpoint");
  one->asked = 0;
  one->writes = "step-6";
  one->job.elsewhere.kept = false; /* it need not be where the job's own go */
  assert_int_equal(job_fixture_run(&one->job, script_of(false, script), &code), EVEN_OK);
  assert_int_equal(code, 0);
  assert_int_equal(one->asked, 1); /* it is still here */
  assert_string_equal(one->said, "sftp://me:secret@host/run|any|anybody||");
  assert_true(job_fixture_saw(&one->job, "line 1 resume=step-6|"));
  assert_false(job_fixture_saw(&one->job, "resume=|"));
  assert_false(job_fixture_saw(&one->job, "secret"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_fresh_disk_takes_the_far_one, open_place, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(what_is_here_and_newer_is_taken, open_place, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(an_older_one_here_is_not, open_place, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(nobody_is_asked_who_was_not_named, open_place, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(a_place_that_does_not_answer, open_place, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(a_restart_after_a_lost_disk, open_place, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(steps_are_not_given_up_for_a_place_that_does_not_answer, open_place,
                                      job_fixture_teardown),
      cmocka_unit_test_setup_teardown(it_is_asked_again_for_a_while, open_place, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(what_never_trained_begins_anew, open_place, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(attempts_have_their_turns, open_place, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(the_same_where_something_is_there, open_place, job_fixture_teardown),
      cmocka_unit_test_setup_teardown(a_named_place, open_place, job_fixture_teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
