/* A job that has lost its run folder to another host's puts no checkpoint in place any more. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "checkpoint/reader.h"
#include "checkpoint/scratch.h"
#include "checkpoint/snapshot.h"
#include "os/calls.h"
#include "os/lease.h"
#include "os/lease_sign.h"
#include "os/shared_memory.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const char own[] = "boot pid:[1]\nnear\n100\nmine\n0\nmark\n";
static const char next[] = "boot pid:[2]\nthird\n300\nmine\n1\nmark\n";
static const char others[] = "boot pid:[3]\nfar\n4711\nsomebody\n0\nmark\n";

static void put_sign(const char *name, const char *text) {
  FILE *file = fopen(scratch_path(name), "wb");
  assert_true(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void hide_sign(void) {
  assert_int_equal(unlink(scratch_path(EVEN_LEASE_SIGN)), 0);
}

static void expect_refusal(even_status status, const char *words) {
  assert_int_equal(status, EVEN_ERR_IN_USE);
  if (strstr(even_error_last()->what, words) == NULL) {
    fail_msg("%s", even_error_last()->what);
  }
  assert_non_null(strstr(even_error_last()->what, "/new is not written: run folder "));
  assert_non_null(strstr(even_error_last()->fix, "another --name"));
}

static even_status open_writer(even_checkpoint_writer **out) {
  const even_checkpoint_params params = {
      .size = sizeof params, .folder = scratch_path("new"), .run_folder = scratch, .job = "mine"};
  return even_checkpoint_writer_open(&params, out);
}

static even_checkpoint_writer *written(void) {
  even_checkpoint_tensor tensors[3];
  even_checkpoint_writer *writer = NULL;
  sample_tensors(tensors, 1);
  const even_checkpoint_file file = {
      .size = sizeof file, .name = "model.safetensors", .tensors = tensors, .tensor_count = 3};
  assert_int_equal(open_writer(&writer), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_OK);
  return writer;
}

/* First: this process has not seen its job's sign yet. A host that does not share the folder has an old one there. */
static void what_an_earlier_job_left_says_nothing(void **state) {
  (void)state;
  put_sign(EVEN_LEASE_SIGN, others);
  assert_false(even_lease_is_known(scratch, "mine"));
  assert_int_equal(even_checkpoint_writer_commit(written(), "{}"), EVEN_OK);
  assert_int_equal(even_checkpoint_verify(scratch_path("new"), NULL), EVEN_OK);
}

/* In a process of its own, as a rank that dies once it has taken it. */
static void take_snapshot(const even_shared_memory *memory, bool sign_seen) {
  even_checkpoint_tensor tensors[3];
  even_checkpoint_snapshot *snapshot = NULL;
  const even_checkpoint_params params = {.size = sizeof params,
                                         .folder = scratch_path("new"),
                                         .run_folder = scratch,
                                         .job = "mine",
                                         .sign_seen = sign_seen};
  int end = 0;
  sample_tensors(tensors, 1);
  const even_checkpoint_file file = {
      .size = sizeof file, .name = "model.safetensors", .tensors = tensors, .tensor_count = 3};
  pid_t rank = fork();
  if (rank == 0) {
    bool taken = even_checkpoint_snapshot_open(dup(memory->fd), &snapshot) == EVEN_OK &&
                 even_checkpoint_snapshot_take(snapshot, &params, &file, 1, "{}") == EVEN_OK;
    _exit(taken ? 0 : 1);
  }
  assert_true(rank > 0);
  assert_int_equal(waitpid(rank, &end, 0), rank);
  assert_int_equal(end, 0);
}

/* In a process of its own, which has not seen it either: it began, or slept, when the folder was taken over. */
static void but_where_the_agent_has_seen_the_own_one(void **state) {
  int end = 0;
  (void)state;
  put_sign(EVEN_LEASE_SIGN, others);
  pid_t rank = fork();
  if (rank == 0) {
    const even_checkpoint_params params = {
        .size = sizeof params, .folder = scratch_path("new"), .run_folder = scratch, .job = "mine", .sign_seen = true};
    even_checkpoint_writer *writer = NULL;
    even_status status = even_checkpoint_writer_open(&params, &writer);
    _exit(status == EVEN_ERR_IN_USE && strstr(even_error_last()->what, "host far") != NULL ? 0 : 1);
  }
  assert_true(rank > 0);
  assert_int_equal(waitpid(rank, &end, 0), rank);
  assert_int_equal(end, 0);
  assert_int_equal(scratch_entries(), 1); /* the sign */
}

static void nor_where_an_agent_finishes_for_a_rank(void **state) {
  (void)state;
  even_shared_memory memory = {.fd = -1};
  even_text folder = EVEN_TEXT_EMPTY;
  put_sign(EVEN_LEASE_SIGN, others);
  assert_int_equal(even_shared_memory_begin(EVEN_SNAPSHOT_LABEL, &memory), EVEN_OK);
  take_snapshot(&memory, false);
  assert_int_equal(even_snapshot_finish(memory.fd, &folder), EVEN_OK);
  assert_int_equal(even_checkpoint_verify(scratch_path("new"), NULL), EVEN_OK);
  even_text_free(&folder);
  even_shared_memory_close(&memory);
}

/* The rank has seen its job's sign; its agent has not. */
static void what_an_agent_finishes_is_asked_for_too(void **state) {
  (void)state;
  even_shared_memory memory = {.fd = -1};
  even_text folder = EVEN_TEXT_EMPTY;
  put_sign(EVEN_LEASE_SIGN, own);
  assert_int_equal(even_shared_memory_begin(EVEN_SNAPSHOT_LABEL, &memory), EVEN_OK);
  take_snapshot(&memory, false);
  put_sign(EVEN_LEASE_SIGN, others);
  expect_refusal(even_snapshot_finish(memory.fd, &folder), "host far (process 4711)");
  assert_false(scratch_has("new"));
  put_sign(EVEN_LEASE_SIGN, next);
  assert_int_equal(even_snapshot_finish(memory.fd, &folder), EVEN_OK);
  assert_int_equal(even_checkpoint_verify(scratch_path("new"), NULL), EVEN_OK);
  even_text_free(&folder);
  even_shared_memory_close(&memory);
}

/* Its copy was taken when another job had the folder already. */
static void so_is_what_a_rank_took_that_was_told_of_the_sign(void **state) {
  (void)state;
  even_shared_memory memory = {.fd = -1};
  even_text folder = EVEN_TEXT_EMPTY;
  put_sign(EVEN_LEASE_SIGN, others);
  assert_int_equal(even_shared_memory_begin(EVEN_SNAPSHOT_LABEL, &memory), EVEN_OK);
  take_snapshot(&memory, true);
  expect_refusal(even_snapshot_finish(memory.fd, &folder), "host far (process 4711)");
  assert_false(scratch_has("new"));
  even_text_free(&folder);
  even_shared_memory_close(&memory);
}

static void where_there_never_was_one_nobody_asks(void **state) {
  (void)state;
  assert_int_equal(even_checkpoint_writer_commit(written(), "{}"), EVEN_OK);
  assert_int_equal(even_checkpoint_verify(scratch_path("new"), NULL), EVEN_OK);
  assert_int_equal(even_lease_is_of(NULL, "mine"), EVEN_OK);
  assert_int_equal(even_lease_is_of("", "mine"), EVEN_OK);
  assert_int_equal(even_lease_is_of(scratch, NULL), EVEN_OK);
}

static void a_sign_that_another_has_put_there_meanwhile_is_heeded(void **state) {
  (void)state;
  even_checkpoint_writer *writer = NULL;
  put_sign(EVEN_LEASE_SIGN, own);
  writer = written();
  put_sign(EVEN_LEASE_SIGN, others);
  expect_refusal(even_checkpoint_writer_commit(writer, "{}"), "it was taken over from host far (process 4711)");
  assert_int_equal(scratch_entries(), 1); /* the sign: nothing half, nothing left */
  expect_refusal(open_writer(&writer), "host far (process 4711)");
  assert_null(writer);
  assert_int_equal(scratch_entries(), 1);
}

static void an_older_checkpoint_of_that_name_stays(void **state) {
  (void)state;
  even_checkpoint_writer *writer = NULL;
  const even_checkpoint_params params = {
      .size = sizeof params, .folder = scratch_path("new"), .replace = true, .run_folder = scratch, .job = "mine"};
  even_checkpoint_info info;
  assert_int_equal(save_sample(scratch_path("new"), false, 7), EVEN_OK);
  put_sign(EVEN_LEASE_SIGN, own);
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  put_sign(EVEN_LEASE_SIGN, others);
  expect_refusal(even_checkpoint_writer_commit(writer, "{\"step\": 8}"), "host far");
  assert_int_equal(even_checkpoint_inspect(scratch_path("new"), &info), EVEN_OK);
  assert_int_equal(info.step, 7);
  even_checkpoint_info_free(&info);
}

static void the_next_leader_of_the_same_job_is_no_other(void **state) {
  (void)state;
  put_sign(EVEN_LEASE_SIGN, own);
  even_checkpoint_writer *writer = written();
  put_sign(EVEN_LEASE_SIGN, next);
  assert_int_equal(even_checkpoint_writer_commit(writer, "{}"), EVEN_OK);
}

static int sleeps;

static int count_sleep(const struct timespec *time) {
  (void)time;
  sleeps++;
  return 0;
}

/* The next leader has NAME.1, for the one before it still held NAME, and that one has ended now. */
static void one_that_was_there_and_is_gone_says_nothing(void **state) {
  (void)state;
  put_sign(EVEN_LEASE_SIGN, own);
  even_checkpoint_writer *writer = written();
  hide_sign();
  sleeps = 0;
  even_os.nanosleep = count_sleep;
  assert_int_equal(even_checkpoint_writer_commit(writer, "{}"), EVEN_OK);
  assert_int_equal(sleeps, 0);
  assert_int_equal(even_checkpoint_verify(scratch_path("new"), NULL), EVEN_OK);
}

static void one_that_other_hosts_do_not_see_cannot_be_lost(void **state) {
  (void)state;
  put_sign(EVEN_LEASE_SIGN, own);
  even_checkpoint_writer *writer = written();
  hide_sign();
  put_sign(EVEN_LEASE_UNSEEN, own);
  assert_int_equal(even_checkpoint_writer_commit(writer, "{}"), EVEN_OK);
}

static void what_cannot_be_looked_at_is_not_lost(void **state) {
  (void)state;
  put_sign(EVEN_LEASE_SIGN, own);
  fault_os_from(FAULT_open, 1, EIO);
  even_status status = even_lease_is_of(scratch, "mine");
  fault_reset();
  assert_int_equal(status, EVEN_OK);
}

static void memory_may_be_short(void **state) {
  (void)state;
  int failures = 0;
  put_sign(EVEN_LEASE_SIGN, own);
  for (long nth = 1;; nth++) {
    even_checkpoint_writer *writer = NULL;
    fault_allocation(nth);
    even_status status = open_writer(&writer);
    if (status == EVEN_OK) {
      status = even_checkpoint_writer_commit(writer, "{}");
    }
    bool failed_one = fault_allocations() >= nth;
    long leaked = fault_live_blocks();
    fault_reset();
    assert_int_equal(leaked, 0);
    assert_true(status == EVEN_ERR_MEMORY || status == EVEN_OK); /* what sweeps does without */
    failures += status == EVEN_ERR_MEMORY;
    assert_int_equal(scratch_has("new"), status == EVEN_OK);
    assert_int_equal(status == EVEN_OK ? even_checkpoint_remove(scratch_path("new")) : EVEN_OK, EVEN_OK);
    if (!failed_one) {
      assert_int_equal(status, EVEN_OK);
      assert_true(failures > 8);
      break;
    }
  }
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, scratch_make, scratch_remove)
  /* the first ones in a process that has not seen its job's sign */
  const struct CMUnitTest tests[] = {CASE(what_an_earlier_job_left_says_nothing),
                                     CASE(but_where_the_agent_has_seen_the_own_one),
                                     CASE(nor_where_an_agent_finishes_for_a_rank),
                                     CASE(where_there_never_was_one_nobody_asks),
                                     CASE(what_an_agent_finishes_is_asked_for_too),
                                     CASE(so_is_what_a_rank_took_that_was_told_of_the_sign),
                                     CASE(a_sign_that_another_has_put_there_meanwhile_is_heeded),
                                     CASE(an_older_checkpoint_of_that_name_stays),
                                     CASE(the_next_leader_of_the_same_job_is_no_other),
                                     CASE(one_that_was_there_and_is_gone_says_nothing),
                                     CASE(one_that_other_hosts_do_not_see_cannot_be_lost),
                                     CASE(what_cannot_be_looked_at_is_not_lost),
                                     CASE(memory_may_be_short)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
