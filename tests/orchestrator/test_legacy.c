/* What a killed agent leaves: the last that is whole, whoever writes it, whenever that one is killed. */
#include "orchestrator/legacy.h"

#include "base/fail.h"
#include "orchestrator/aside.h"
#include "orchestrator/elastic.h"
#include "orchestrator/job.h"
#include "support/fault.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static int reset(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

static void begin(even_job *job, int attempt, int planned, const char *began) {
  memset(job, 0, sizeof *job);
  memset(job->id, 'a', sizeof job->id - 1);
  job->attempt = attempt;
  job->planned = planned;
  job->restarts.since = 40;
  job->era = 2;
  job->turn = 7;
  job->shortages.count = 1;
  job->shortages.items[0].most = 12;
  even_text_add(&job->foreign, "before");
  even_text_add(&job->began, began);
}

static void end(even_job *job) {
  even_text_free(&job->foreign);
  even_text_free(&job->lineage);
  even_text_free(&job->began);
}

static void the_next_one_is_the_same_job(void **state) {
  (void)state;
  even_legacy legacy;
  even_job job;
  even_job next;
  assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
  assert_false(even_legacy_is_left(&legacy));
  assert_null(even_legacy_run_name(&legacy));
  begin(&job, 3, 1, "then");
  pid_t agent = fork();
  if (agent == 0) {
    even_legacy_name(&legacy, "demo");
    _exit(even_legacy_leave(&legacy, &job) == EVEN_OK ? 0 : 1);
  }
  int code = -1;
  assert_int_equal(waitpid(agent, &code, 0), agent);
  assert_int_equal(code, 0);
  assert_string_equal(even_legacy_run_name(&legacy), "demo");
  assert_true(even_legacy_is_left(&legacy));
  assert_int_equal(even_legacy_restarts(&legacy), 2);
  memset(&next, 0, sizeof next);
  assert_int_equal(even_legacy_take(&legacy, &next), EVEN_OK);
  assert_string_equal(next.id, job.id);
  assert_int_equal(next.attempt, 4);
  assert_int_equal(next.planned, 1);
  assert_int_equal(next.restarts.since, 40);
  assert_int_equal(next.era, 3);
  assert_int_equal(next.turn, 7);
  assert_int_equal(next.shortages.items[0].most, 12);
  assert_string_equal(even_text_string(&next.foreign), "before");
  assert_string_equal(even_text_string(&next.lineage), "");
  assert_string_equal(even_text_string(&next.began), "then");
  end(&next);
  end(&job);
  even_legacy_close(&legacy);
}

/* Of several hosts on one machine each clears up its own, and of two agents on one host. */
static void its_processes_are_known_by_a_mark(void **state) {
  static const struct {
    int groups;
    int era;
    const char *mark;
  } jobs[] = {{1, 0, "EVENSTEP_JOB=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
              {2, 0, "EVENSTEP_AGENT=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-0-4194000"},
              {1, 2, "EVENSTEP_AGENT=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-2000-4194000"}};
  (void)state;
  even_legacy legacy;
  even_job job;
  char mark[EVEN_SWEEP_MARK];
  assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
  assert_int_equal(even_legacy_keeper(&legacy), getpid()); /* who starts agents */
  assert_int_equal(even_legacy_keeper(NULL), getpid());
  legacy.starter = 4194000;
  assert_false(even_legacy_mark(&legacy, mark));
  for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; i++) {
    begin(&job, 3, 1, "then");
    job.groups = jobs[i].groups;
    job.era = jobs[i].era;
    assert_int_equal(even_legacy_leave(&legacy, &job), EVEN_OK);
    assert_true(even_legacy_mark(&legacy, mark));
    assert_string_equal(mark, jobs[i].mark);
    end(&job);
  }
  even_legacy_close(&legacy);
}

static bool next_shares(const even_legacy *legacy) {
  even_job next;
  memset(&next, 0, sizeof next);
  assert_int_equal(even_legacy_continue(legacy, &next), EVEN_OK);
  bool shares = next.shares;
  end(&next);
  return shares;
}

/* Also while the first attempt runs: it was left before any step. */
static void the_next_one_knows_of_a_global_batch(void **state) {
  (void)state;
  even_rank_progress rank = {.joined = true, .stepped = true};
  const even_progress progress = {.ranks = &rank, .count = 1};
  even_legacy legacy;
  even_job job;
  for (int earlier = 0; earlier < 2; earlier++) {
    assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
    begin(&job, 0, 0, "then");
    job.shares = earlier == 1;
    assert_int_equal(even_legacy_leave(&legacy, &job), EVEN_OK);
    rank.shared = false;
    even_legacy_progress(&legacy, &progress);
    assert_int_equal(next_shares(&legacy), earlier);
    rank.shared = true;
    even_legacy_progress(&legacy, &progress);
    assert_true(next_shares(&legacy));
    rank.shared = false;
    even_legacy_progress(&legacy, &progress);
    assert_true(next_shares(&legacy));
    end(&job);
    even_legacy_close(&legacy);
  }
}

/* Also of a training that has begun again from a checkpoint long before its furthest step. */
static void each_step_is_an_advance(void **state) {
  static const uint64_t last[] = {999, 500, 501};
  (void)state;
  even_rank_progress rank = {.stepped = true};
  const even_progress progress = {.ranks = &rank, .count = 1};
  even_legacy legacy;
  assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
  for (size_t i = 0; i < sizeof last / sizeof last[0]; i++) {
    rank.stepped = false; /* the next agent has not heard of them yet */
    even_legacy_progress(&legacy, &progress);
    assert_false(even_legacy_advanced(&legacy, true));
    rank = (even_rank_progress){.stepped = true, .last_step = last[i]};
    even_legacy_progress(&legacy, &progress);
    assert_true(even_legacy_advanced(&legacy, true));
    even_legacy_progress(&legacy, &progress);
    assert_false(even_legacy_advanced(&legacy, true));
  }
  even_legacy_close(&legacy);
}

static void what_is_not_whole_takes_nothing_away(void **state) {
  (void)state;
  char longer[EVEN_LEGACY_TEXT + 1];
  even_legacy legacy;
  even_job job;
  even_job next;
  memset(longer, 'x', sizeof longer - 1);
  longer[sizeof longer - 1] = '\0';
  assert_int_equal(even_legacy_leave(NULL, NULL), EVEN_OK); /* of an agent that nobody starts again */
  assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
  for (int attempt = 0; attempt < 3; attempt++) { /* both places, and one of them again */
    begin(&job, attempt, 0, "then");
    assert_int_equal(even_legacy_leave(&legacy, &job), EVEN_OK);
    end(&job);
    begin(&job, 99, 0, longer);
    assert_int_equal(even_legacy_leave(&legacy, &job), EVEN_ERR_INPUT);
    end(&job);
    memset(&next, 0, sizeof next);
    assert_int_equal(even_legacy_restarts(&legacy), attempt);
    assert_int_equal(even_legacy_take(&legacy, &next), EVEN_OK);
    assert_int_equal(next.attempt, attempt + 1);
    end(&next);
  }
  even_legacy_close(&legacy);
}

/* Who was drained is in neither list, who came by itself cannot be started. */
static void the_next_one_knows_the_hosts(void **state) {
  (void)state;
  even_host_agent agents[5] = {{.name = "here"},
                               {.name = "b", .wish = 0, .place = 3, .count = 2},
                               {.name = "c", .wish = 1, .lacked = 1, .lost = true},
                               {.name = "d", .wish = 1, .count = 1, .came = true},
                               {.name = "e", .witness = true}};
  even_elastic elastic = {.left = {{.name = "f", .ranks = 4}, {.name = "b", .ranks = 2, .in = true}}, .left_count = 2};
  even_hosts hosts = {.agents = agents, .count = 5, .elastic = &elastic};
  even_legacy legacy;
  even_job job;
  size_t count = 7;
  assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
  assert_null(even_legacy_hosts(&legacy, &count));
  assert_int_equal(count, 0);
  begin(&job, 0, 0, "then");
  for (int attempt = 0; attempt < 3; attempt++) { /* written anew each time */
    job.hosts = &hosts;
    assert_int_equal(even_legacy_leave(&legacy, &job), EVEN_OK);
  }
  const even_legacy_host *its = even_legacy_hosts(&legacy, &count);
  assert_int_equal(count, 3);
  assert_string_equal(its[0].name, "b");
  assert_int_equal(its[0].wish, 0);
  assert_int_equal(its[0].ranks, 2);
  assert_int_equal(its[0].place, 3);
  assert_false(its[0].away);
  assert_string_equal(its[1].name, "c");
  assert_int_equal(its[1].ranks, 1);
  assert_string_equal(its[2].name, "f");
  assert_int_equal(its[2].ranks, 4);
  assert_true(its[2].away);
  even_legacy_part(&legacy, "c", true);  /* it is left out, and looked for; */
  even_legacy_part(&legacy, "b", false); /* and this one is drained */
  even_legacy_part(&legacy, "nobody", false);
  even_legacy_part(NULL, "c", false);
  its = even_legacy_hosts(&legacy, &count);
  assert_int_equal(count, 2);
  assert_string_equal(its[0].name, "c");
  assert_true(its[0].away);
  assert_string_equal(its[1].name, "f");
  assert_string_equal(even_legacy_job_id(&legacy), job.id); /* all else is as it was */
  assert_true(even_legacy_is_left(&legacy));
  end(&job);
  even_legacy_close(&legacy);
}

static even_status open_and_take(void *context) {
  even_legacy legacy;
  even_job job;
  (void)context;
  memset(&job, 0, sizeof job);
  EVEN_TRY(even_legacy_open(&legacy));
  even_status status = even_legacy_leave(&legacy, &job);
  memcpy(legacy.page->jobs[1].began, "then", 5); /* so that there is something to allocate */
  if (status == EVEN_OK) {
    status = even_legacy_take(&legacy, &job);
  }
  end(&job);
  even_legacy_close(&legacy);
  return status;
}

static void survives_every_fault(void **state) {
  (void)state;
  assert_true(fault_each_allocation(open_and_take, NULL) >= 1);
  assert_true(fault_each_os(open_and_take, NULL, ENOMEM) >= 1);
}

/* Also that a place is not there any more, and that its time goes on. */
static void it_does_without_the_same_places(void **state) {
  (void)state;
  even_legacy legacy;
  even_job job;
  even_aside aside = {.count = 0};
  even_aside next = {.count = 0};
  const even_aside_place *out = NULL;
  const even_agent_params params = {.aside = &aside};
  assert_int_equal(even_legacy_open(&legacy), EVEN_OK);
  even_legacy_aside(&legacy, &next); /* of nobody */
  assert_int_equal(next.count, 0);
  for (int i = 0; i < 3; i++) { /* twice that of rank 1, and once that of rank 0 */
    even_aside_failed(&aside, "there", i < 2 ? 1 : 0, "cpu:1", 3, 1, 500, &out);
  }
  begin(&job, 2, 0, "");
  job.params = &params;
  assert_int_equal(even_legacy_leave(&legacy, &job), EVEN_OK);
  even_legacy_aside(&legacy, &next);
  assert_true(even_aside_any(&next) && even_aside_has(&next, "there", 1) && !even_aside_has(&next, "", 1));
  assert_int_equal(next.items[0].until_ns, aside.items[0].until_ns);
  even_aside_failed(&next, "there", 0, "cpu:0", 3, 1, 700, &out); /* a second time in a row */
  assert_true(out != NULL && out->place == 0);
  end(&job);
  begin(&job, 3, 0, ""); /* a job without the option */
  assert_int_equal(even_legacy_leave(&legacy, &job), EVEN_OK);
  even_legacy_aside(&legacy, &next);
  assert_false(even_aside_any(&next));
  end(&job);
  even_legacy_close(&legacy);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(the_next_one_is_the_same_job, reset),
      cmocka_unit_test_teardown(its_processes_are_known_by_a_mark, reset),
      cmocka_unit_test_teardown(the_next_one_knows_of_a_global_batch, reset),
      cmocka_unit_test_teardown(each_step_is_an_advance, reset),
      cmocka_unit_test_teardown(the_next_one_knows_the_hosts, reset),
      cmocka_unit_test_teardown(it_does_without_the_same_places, reset),
      cmocka_unit_test_teardown(what_is_not_whole_takes_nothing_away, reset),
      cmocka_unit_test_teardown(survives_every_fault, reset),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
