/* What is said and written of a failing job's collectives: of ranks that stand in one, as long as one of them lives. */
#include "comm/flight.h"
#include "orchestrator/job.h"
#include "orchestrator/last_call.h"
#include "os/file.h"
#include "os/shared_memory.h"
#include "support/folder.h"

#include <evenstep/flight.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static void take_notice(void *context, const char *text) {
  even_text_add(context, text);
  even_text_add(context, "|");
}

/* Rank 0 waits in its third call for rank 1, which makes no more than two. */
static void be_rank(int rank, int fd) {
  even_comm_params params = {.size = sizeof params, .rank = rank, .ranks = 2, .timeout_seconds = 60, .spin = -1};
  even_comm *comm = NULL;
  float data[8] = {0};
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (even_comm_open(&params, fd, &comm) == EVEN_OK && even_comm_barrier(comm) == EVEN_OK && rank == 0) {
    even_comm_set_site(comm, "train.c:41");
    (void)!even_comm_all_reduce(comm, data, 8, EVEN_F32, EVEN_SUM);
  }
  for (;;) {
    (void)pause();
  }
}

static void wait_until_inside(int fd) {
  even_flight *flight = NULL;
  even_flight_call call = {0};
  assert_int_equal(even_flight_open(fd, &flight), EVEN_OK);
  while (even_flight_read(flight, 0, &call, 1) != 1 || call.number < 3) {
  }
  while (even_flight_read(flight, 1, &call, 1) != 1 || call.number < 2 || call.state != EVEN_FLIGHT_DONE) {
  }
  even_flight_close(flight);
}

/* As a hang tells it of each rank. */
static void assert_last_calls(const even_job_rank *ranks) {
  even_last_call last;
  char words[400];
  even_last_call_read(ranks[0].pid, &last);
  assert_true(last.known && last.waits);
  even_last_call_describe(&last, words, sizeof words);
  assert_string_equal(words, "call 3 (all_reduce of 8 F32 elements with SUM) of a group of 2 ranks, at train.c:41");
  assert_string_equal(last.reached,
                      "rank 0 in call 3 (all_reduce of 8 F32 elements with SUM) at train.c:41, rank 1 done "
                      "with call 2 (barrier)");
  even_last_call_read(ranks[1].pid, &last);
  assert_true(last.known && !last.waits);
  even_last_call_describe(&last, words, sizeof words);
  assert_string_equal(words, "call 2 (barrier) of a group of 2 ranks");
  even_last_call_read(getpid(), &last); /* it is in none */
  assert_false(last.known || last.waits);
  even_last_call_describe(&last, words, sizeof words);
  assert_string_equal(words, "");
}

static void give_folder(even_job *job, char *folder) {
  char path[128];
  assert_int_equal(folder_make("flights", folder), 0);
  (void)snprintf(path, sizeof path, "%s/logs", folder);
  assert_int_equal(even_folder_make(path), EVEN_OK);
  even_text_add(&job->run_folder, folder);
}

static void the_collectives_of_a_failing_job_are_kept(void **state) {
  char folder[FOLDER_BYTES];
  char path[128];
  even_text seen = EVEN_TEXT_EMPTY;
  even_text file = EVEN_TEXT_EMPTY;
  even_job_rank ranks[2] = {{.alive = true}, {.alive = true}};
  even_agent_params agent = {.size = sizeof agent, .observer = {.context = &seen, .notice = take_notice}};
  even_job job = {.params = &agent, .ranks = ranks, .count = 2};
  even_comm_params params = {.size = sizeof params, .ranks = 2};
  int fd = -1;
  (void)state;
  give_folder(&job, folder);
  assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_OK);
  for (int rank = 0; rank < 2; rank++) {
    ranks[rank].pid = fork();
    if (ranks[rank].pid == 0) {
      be_rank(rank, fd);
    }
  }
  wait_until_inside(fd);
  assert_last_calls(ranks);
  (void)close(fd);
  even_job_flights_tell(&job);
  assert_non_null(strstr(seen.data, "rank 0 in call 3 (all_reduce of 8 F32 elements with SUM) at train.c:41"));
  assert_non_null(strstr(seen.data, "rank 1 done with call 2 (barrier)|"));
  (void)snprintf(path, sizeof path, "%s/logs/flight.json", folder);
  assert_int_equal(even_file_read(path, 1 << 20, &file), EVEN_OK);
  assert_non_null(strstr(file.data, "\"site\": \"train.c:41\""));
  assert_non_null(strstr(file.data, "\"rank\": 1"));
  assert_non_null(strstr(file.data, "\"state\": \"begun\""));
  size_t length = seen.length;
  even_job_flights_tell(&job); /* once an attempt */
  assert_int_equal(seen.length, length);
  for (int rank = 0; rank < 2; rank++) {
    (void)kill(ranks[rank].pid, SIGKILL);
    (void)waitpid(ranks[rank].pid, NULL, 0);
  }
  job.flights_told = false;
  even_job_flights_tell(&job); /* nobody is left to have anything: no fault */
  assert_int_equal(seen.length, length);
  even_text_free(&seen);
  even_text_free(&file);
  even_text_free(&job.run_folder);
  assert_int_equal(folder_remove(folder), 0);
}

/* This process's group with a rank of another host, which told long ago that it waited, and has gone on since. */
static void what_another_host_told_once_is_no_news(void **state) {
  even_text seen = EVEN_TEXT_EMPTY;
  char folder[FOLDER_BYTES];
  even_job_rank ranks[2] = {{.alive = true, .pid = getpid()}, {.alive = true, .elsewhere = true}};
  even_agent_params agent = {.size = sizeof agent, .observer = {.context = &seen, .notice = take_notice}};
  even_job job = {.params = &agent, .ranks = ranks, .count = 2};
  even_comm_params params = {.size = sizeof params, .ranks = 2};
  even_comm_layout layout;
  even_shared_memory memory;
  const even_comm_call barrier = {.kind = EVEN_CALL_BARRIER};
  int fd = -1;
  (void)state;
  give_folder(&job, folder);
  assert_int_equal(even_comm_create_segment(&params, &fd), EVEN_OK);
  assert_int_equal(even_comm_layout_of(&params, &layout), EVEN_OK);
  assert_int_equal(even_shared_memory_duplicate(fd, &memory), EVEN_OK);
  unsigned char *at = memory.address;
  even_comm_control *controls = (even_comm_control *)(void *)(at + layout.controls);
  even_flight_writer here = {
      .records = (even_flight_record *)(void *)(at + layout.flights), .stride = layout.flight_stride, .ranks = 2};
  even_flight_writer there = here;
  there.rank = 1;
  atomic_store(&controls[0].process, (uint32_t)getpid());
  even_flight_begin(&there, &barrier, 1);
  even_flight_begin(&here, &barrier, 1);
  even_flight_end(&here, EVEN_OK);
  even_job_flights_tell(&job);
  assert_int_equal(seen.length, 0);
  job.flights_told = false;
  even_flight_begin(&here, &barrier, 2); /* now one of this host waits, which is news */
  even_job_flights_tell(&job);
  assert_non_null(strstr(even_text_string(&seen), "rank 0 in call 2 (barrier), rank 1 in call 1 (barrier)|"));
  even_shared_memory_close(&memory);
  (void)close(fd);
  even_text_free(&seen);
  even_text_free(&job.run_folder);
  assert_int_equal(folder_remove(folder), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(the_collectives_of_a_failing_job_are_kept),
                                     cmocka_unit_test(what_another_host_told_once_is_no_news)};
  return cmocka_run_group_tests_name("the flight record of a job", tests, NULL, NULL);
}
