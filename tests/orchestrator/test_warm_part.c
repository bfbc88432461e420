/* A host's part in the attempt that follows: by what its processes, which start beforehand, are known. */
#include "orchestrator/warm_part.h"

#include "base/json_reader.h"
#include "orchestrator/environment.h"
#include "orchestrator/legacy.h"
#include "os/clock.h"
#include "os/pipe.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { STARTER = 4194000 };

/* Rank 1 of two, on the second of two hosts; a shell, which says its mark, and then that it waits. */
static const char PLACES[] =
    "{\"number\":1,\"warm\":true,\"part\":{\"job\":\"0123\",\"attempt\":1,\"max_restarts\":0,\"world\":2,\"first\":1,"
    "\"count\":1,\"first_spare\":2,\"spares\":0,\"all_spares\":0,\"group\":1,\"groups\":2,\"most_groups\":2,\"era\":3,"
    "\"master_address\":\"10.0.0.1\",\"master_port\":4711,\"run_folder\":\"/nowhere\",\"environment\":[],"
    "\"command\":[\"sh\",\"-c\",\"echo EVENSTEP_AGENT=$EVENSTEP_AGENT.;"
    "printf 1 > /proc/self/fd/${EVENSTEP_AWAITS#*,}; read -r line < /proc/self/fd/${EVENSTEP_AWAITS%%,*}\"],"
    "\"quota\":[null],\"shown\":[false],\"unpinned\":true,\"rings\":2,\"outlast_seconds\":%d}}";

static void read_on(even_warm_process *process) {
  uint64_t until = even_clock_ns() + 120000000000u;
  even_pipe_state state = EVEN_PIPE_EMPTY;
  while (state != EVEN_PIPE_ENDED) {
    char buffer[512];
    size_t got = 0;
    assert_true(even_clock_ns() < until);
    state = even_pipe_read(process->process.output, buffer, sizeof buffer, &got);
    even_text_append(&process->said[0], buffer, got);
  }
}

static void take(even_warm *warm, const even_rank_place *place, const char *mark) {
  even_warm_process process;
  assert_true(even_warm_take(warm, place, NULL, &process));
  read_on(&process);
  assert_non_null(strstr(even_text_string(&process.said[0]), mark));
  even_process_wait(process.process.pid);
  even_pipe_close(process.process.output);
  even_pipe_close(process.process.error);
  even_text_free(&process.said[0]);
  even_text_free(&process.said[1]);
}

static void expect(int outlast_seconds, const even_legacy *legacy, pid_t keeper) {
  uint64_t until = even_clock_ns() + 120000000000u;
  even_device devices[2] = {{.name = ""}};
  const even_device_list world = {devices, 2};
  const even_rank_place place = {.rank = 1,
                                 .first = 1,
                                 .local = 1,
                                 .group = 1,
                                 .groups = 2,
                                 .era = 3,
                                 .keeper = keeper,
                                 .devices = &world,
                                 .master_address = "10.0.0.1",
                                 .interface = "eth0",
                                 .master_port = 4711,
                                 .attempt = 1,
                                 .telemetry_fd = -1,
                                 .snapshot_fd = -1,
                                 .generation_fd = -1,
                                 .job = "0123",
                                 .run_folder = "/nowhere"};
  char mark[EVEN_SWEEP_MARK];
  char text[sizeof PLACES + 16];
  char said[EVEN_SWEEP_MARK + 2];
  even_loop loop;
  even_warm_part part = {.warm = NULL};
  even_text answer = EVEN_TEXT_EMPTY;
  json_t *content = NULL;
  int length = snprintf(text, sizeof text, PLACES, outlast_seconds);
  assert_in_range(length, 1, sizeof text - 1);
  assert_int_equal(even_json_parse("it", text, (size_t)length, &content), EVEN_OK);
  assert_int_equal(even_loop_open(&loop), EVEN_OK);
  assert_int_equal(even_warm_part_hear(&part, &loop, "eth0", 0, legacy, content, &answer), EVEN_OK);
  assert_non_null(part.warm);
  while (even_warm_settled(part.warm) < 1) {
    assert_true(even_clock_ns() < until);
    assert_int_equal(even_loop_turn(&loop, 100), EVEN_OK);
  }
  even_environment_mark(&place, mark);
  (void)snprintf(said, sizeof said, "%s.", mark);
  take(part.warm, &place, said);
  even_warm_part_close(&part);
  even_text_free(&answer);
  json_decref(content);
  even_loop_close(&loop);
}

/* As ranks are that start with their attempt (guard.c): what one agent has started the next one sweeps. */
static void its_processes_are_known_by_who_starts_agents_where_they_outlast_one(void **state) {
  const even_legacy legacy = {.starter = STARTER};
  (void)state;
  expect(60, &legacy, STARTER);
  expect(0, &legacy, getpid());
  expect(60, NULL, getpid());
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(its_processes_are_known_by_who_starts_agents_where_they_outlast_one),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
