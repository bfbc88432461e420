#include "board_sides.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "os/calls.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

side leader, other;

static void note(void *context, const char *text) {
  even_text_format(context, "%s|", text);
}

static bool replaces; /* sides that are opened: lost ranks' places are taken */

even_status open_side(side *own, bool leads) {
  even_text_free(&own->said);
  memset(own, 0, sizeof *own);
  own->devices = (even_device_list){.items = own->each_device, .count = RANKS};
  own->params = (even_agent_params){.shrink = true,
                                    .replace = replaces,
                                    .devices = &own->devices,
                                    .observer = {.context = &own->said, .notice = note}};
  own->link = (even_link){.fd = -1, .peer = "10.79.0.2"};
  own->agents[1] = (even_host_agent){.index = 1, .name = "there", .link = &own->link, .first = HERE, .count = 2};
  (void)strcpy(own->agents[0].name, "here");
  own->hosts = (even_hosts){.agents = own->agents, .count = 2};
  own->job = (even_job){.params = &own->params,
                        .ranks = own->ranks,
                        .count = RANKS,
                        .first = leads ? 0 : HERE,
                        .local = 2,
                        .alive = leads ? RANKS : 2,
                        .order = own->order,
                        .host = "here",
                        .group = leads ? 0 : 1,
                        .number = leads ? 0 : 1,
                        .groups = 2,
                        .most_groups = 2,
                        .master_address = "10.79.0.1",
                        .hosts = leads ? &own->hosts : NULL,
                        .follower = leads ? NULL : (even_follower *)own, /* nothing is sent by it here */
                        .snapshots = own->snapshots,
                        .generation_fd = -1,
                        .oom = {.kernel_log = -1}};
  for (size_t i = 0; i < RANKS; i++) {
    own->snapshots[i] = -1;
    own->ranks[i].alive = leads || i >= HERE; /* the leader counts all */
    own->ranks[i].elsewhere = (i < HERE) != leads;
    own->ranks[i].output =
        (even_rank_output){.rank = (int)i, .log = -1, .streams = {{.watch = {.fd = -1}}, {.watch = {.fd = -1}}}};
  }
  EVEN_TRY(even_progress_open(-1, RANKS, &own->job.progress));
  EVEN_TRY(even_job_generations_open(&own->job));
  EVEN_TRY(even_job_generations_begin(&own->job));
  return even_generation_open(own->job.generation_fd, &own->ranks_view);
}

void close_side(side *own) {
  even_generation_close(own->ranks_view);
  own->ranks_view = NULL;
  even_job_generations_close(&own->job);
  even_progress_close(&own->job.progress);
  even_text_free(&own->said);
}

/* Nobody is hurt: these ranks have no processes. */
static int refuse_to_kill(pid_t pid, int number) {
  (void)number;
  assert_int_not_equal(pid, THERE);
  assert_int_not_equal(pid, -THERE);
  return 0;
}

int set_up(void **state) {
  (void)state;
  even_os.kill = refuse_to_kill;
  return open_side(&leader, true) == EVEN_OK && open_side(&other, false) == EVEN_OK ? 0 : -1;
}

int tear_down(void **state) {
  (void)state;
  fault_reset();
  even_os = even_os_real;
  close_side(&leader);
  close_side(&other);
  return 0;
}

int set_up_replacing(void **state) {
  replaces = true;
  int failed = set_up(state);
  replaces = false;
  leader.agents[1].busy = leader.agents[1].follows = true;
  return failed;
}

even_status give(bool to_leader, const char *json) {
  json_t *content = NULL;
  EVEN_TRY(even_json_parse("a test", json, strlen(json), &content));
  even_status status =
      to_leader ? even_boards_take(&leader.job, &leader.agents[1], content) : even_boards_follow(&other.job, content);
  json_decref(content);
  return status;
}

even_status carry(uint32_t number) {
  even_text text = EVEN_TEXT_EMPTY;
  even_boards_write(&leader.job, number, &text);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  even_status status = give(false, text.data);
  even_text_free(&text);
  return status;
}

bool report(void) {
  even_text text = EVEN_TEXT_EMPTY;
  bool any = even_boards_report(&other.job, &text);
  if (any) {
    assert_int_equal(give(true, text.data), EVEN_OK);
  }
  even_text_free(&text);
  return any;
}

void all_can_go_on(void) {
  for (int rank = 0; rank < RANKS; rank++) {
    even_generation_say(rank < HERE ? leader.ranks_view : other.ranks_view, rank, "");
  }
}

void kill_rank(size_t rank) {
  const even_process_end end = {.signal = 9};
  even_job_rank_ended(&leader.job, &leader.ranks[rank], &end);
}
