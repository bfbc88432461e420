/* The leader's board of a job of two hosts and that of the other one, without agents: what one writes, the other reads.
 */
#include "orchestrator/boards.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "orchestrator/gifts.h"
#include "orchestrator/remote.h"
#include "os/calls.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 4, HERE = 2, THERE = 4711 /* a number there, which is another process's here */ };

/* A host of two: ranks 0 and 1 are the leader's, 2 and 3 the other's. */
typedef struct side {
  even_job job;
  even_agent_params params;
  even_job_rank ranks[RANKS];
  int snapshots[RANKS];
  size_t order[RANKS];
  even_hosts hosts;
  even_host_agent agents[2];
  even_link link;
  even_generation *ranks_view;
  even_device each_device[RANKS];
  even_device_list devices;
  even_text said; /* to the user: "text|text|" */
} side;

static side leader, other;

static void note(void *context, const char *text) {
  even_text_format(context, "%s|", text);
}

static bool replaces; /* sides that are opened: lost ranks' places are taken */

static even_status open_side(side *own, bool leads) {
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

static void close_side(side *own) {
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

static int set_up(void **state) {
  (void)state;
  even_os.kill = refuse_to_kill;
  return open_side(&leader, true) == EVEN_OK && open_side(&other, false) == EVEN_OK ? 0 : -1;
}

static int tear_down(void **state) {
  (void)state;
  fault_reset();
  even_os = even_os_real;
  close_side(&leader);
  close_side(&other);
  return 0;
}

static int set_up_replacing(void **state) {
  replaces = true;
  int failed = set_up(state);
  replaces = false;
  leader.agents[1].busy = leader.agents[1].follows = true;
  return failed;
}

static even_status give(bool to_leader, const char *json) {
  json_t *content = NULL;
  EVEN_TRY(even_json_parse("a test", json, strlen(json), &content));
  even_status status =
      to_leader ? even_boards_take(&leader.job, &leader.agents[1], content) : even_boards_follow(&other.job, content);
  json_decref(content);
  return status;
}

/* The leader's generation, to the other host. */
static even_status carry(uint32_t number) {
  even_text text = EVEN_TEXT_EMPTY;
  even_boards_write(&leader.job, number, &text);
  assert_int_equal(even_text_status(&text), EVEN_OK);
  even_status status = give(false, text.data);
  even_text_free(&text);
  return status;
}

/* What the other host's ranks have said, to the leader; whether there was anything. */
static bool report(void) {
  even_text text = EVEN_TEXT_EMPTY;
  bool any = even_boards_report(&other.job, &text);
  if (any) {
    assert_int_equal(give(true, text.data), EVEN_OK);
  }
  even_text_free(&text);
  return any;
}

static void what_ranks_say_elsewhere_decides_here(void **state) {
  const bool lost[RANKS] = {true, false, false, false};
  char why[EVEN_GENERATION_WORDS];
  int rank = -1;
  (void)state;
  even_generation_say(leader.ranks_view, 1, "");
  even_generation_say(other.ranks_view, 2, "");
  even_generation_say(other.ranks_view, 3, "it is \"a stream\"");
  assert_false(even_generation_able(leader.job.generation, lost, &rank, why));
  assert_int_equal(rank, 2);
  assert_true(report());
  assert_false(report()); /* told once */
  assert_false(even_generation_able(leader.job.generation, lost, &rank, why));
  assert_int_equal(rank, 3);
  assert_string_equal(why, "it is \"a stream\"");
  even_generation_say(other.ranks_view, 3, "");
  assert_true(report());
  assert_true(even_generation_able(leader.job.generation, lost, &rank, why));
  even_boards_begin(&other.job); /* another attempt: all of it is news again */
  assert_true(report());
}

static void generations_come_one_by_one(void **state) {
  const bool first[RANKS] = {false, false, false, true};
  const bool second[RANKS] = {true, false, false, true};
  (void)state;
  assert_int_equal(carry(0), EVEN_OK); /* as it began */
  assert_int_equal(even_generation_lose(leader.job.generation, first), 1);
  assert_int_equal(even_generation_lose(leader.job.generation, second), 2);
  assert_int_equal(carry(2), EVEN_ERR_INPUT);
  assert_int_equal(carry(1), EVEN_OK);
  assert_int_equal(carry(2), EVEN_OK);
  assert_int_equal(carry(1), EVEN_OK); /* late: nothing */
  assert_int_equal(even_generation_number(other.ranks_view), 2);
  for (int rank = 0; rank < RANKS; rank++) {
    assert_int_equal(even_generation_has(other.ranks_view, rank, 1), !first[rank]);
    assert_int_equal(even_generation_has(other.ranks_view, rank, 2), !second[rank]);
  }
  even_generation_ask(leader.job.generation, EVEN_WISH_STAND);
  assert_int_equal(carry(2), EVEN_OK);
  assert_int_equal(even_generation_wished(other.ranks_view), EVEN_WISH_STAND);
  even_generation_refuse(leader.job.generation);
  assert_int_equal(carry(2), EVEN_OK);
  assert_true(even_generation_refused(other.ranks_view));
}

static void members_meet_where_the_first_of_them_is(void **state) {
  const bool first[RANKS] = {false, false, false, true};
  const bool second[RANKS] = {true, true, false, true};
  char address[EVEN_GENERATION_ADDRESS];
  (void)state;
  assert_int_equal(even_generation_lose(leader.job.generation, first), 1);
  even_boards_turn(&leader.job);
  assert_int_not_equal(even_boards_look_ms(&leader.job), 0); /* rank 0 will say where, without a word */
  assert_int_equal(carry(1), EVEN_OK);
  assert_int_equal(even_boards_look_ms(&other.job), 0); /* that comes as a message */
  assert_int_equal(even_generation_port(other.ranks_view, 1, 0, address), 0);
  even_generation_meet(leader.ranks_view, 1, 4711);
  assert_int_equal(carry(1), EVEN_OK);
  assert_int_equal(even_generation_port(other.ranks_view, 1, 0, address), 4711);
  assert_string_equal(address, "10.79.0.1");
  assert_int_equal(even_generation_port(leader.ranks_view, 1, 0, address), 4711);
  assert_string_equal(address, "");
  even_boards_turn(&leader.job);
  assert_int_equal(even_boards_look_ms(&leader.job), 0);

  assert_int_equal(even_generation_lose(leader.job.generation, second), 2); /* rank 2 leads them */
  leader.ranks[0].alive = leader.ranks[1].alive = false;
  assert_int_equal(carry(2), EVEN_OK);
  even_boards_turn(&other.job); /* nothing to be sent */
  assert_int_not_equal(even_boards_look_ms(&other.job), 0);
  even_generation_meet(other.ranks_view, 2, 4712);
  assert_true(report());
  assert_false(report());
  assert_int_equal(even_generation_port(leader.ranks_view, 2, 0, address), 4712);
  assert_string_equal(address, "10.79.0.2"); /* the other end of its connection */
  assert_int_equal(carry(2), EVEN_OK);       /* to a third host, say; where it is at home nothing changes */
  assert_int_equal(even_generation_port(other.ranks_view, 2, 0, address), 4712);
  assert_string_equal(address, "");
  assert_int_equal(give(true, "{\"ranks\":[],\"number\":1,\"port\":9}"), EVEN_OK); /* of one that is over */
  assert_int_equal(even_generation_port(leader.ranks_view, 2, 0, address), 4712);
}

static void odd_words_are_refused(void **state) {
  static const char *const to_leader[] = {"{\"ranks\":[{\"rank\":1,\"said\":true,\"why\":\"\"}]}",
                                          "{\"ranks\":[{\"said\":true}]}", "{\"ranks\":[{\"rank\":4}]}",
                                          "{\"ranks\":[{\"rank\":2,\"stands\":-1}]}"};
  static const char *const to_other[] = {
      "{\"number\":-1}",
      "{\"number\":0,\"wish\":7}",
      "{\"number\":2,\"members\":[0]}",
      "{\"number\":1,\"members\":[0,4]}",
      "{\"number\":1,\"members\":[\"all\"]}",
  };
  (void)state;
  for (size_t i = 0; i < sizeof to_leader / sizeof to_leader[0]; i++) {
    assert_int_equal(give(true, to_leader[i]), EVEN_ERR_INPUT);
  }
  for (size_t i = 0; i < sizeof to_other / sizeof to_other[0]; i++) {
    assert_int_equal(give(false, to_other[i]), EVEN_ERR_INPUT);
    assert_int_equal(even_generation_number(other.ranks_view), 0);
  }
  close_side(&leader); /* a job whose ranks do not go on has no board */
  even_job alone = {.generation_fd = -1};
  json_t *content = json_object();
  assert_int_equal(even_boards_take(&alone, &leader.agents[1], content), EVEN_ERR_INPUT);
  assert_int_equal(even_boards_follow(&alone, content), EVEN_ERR_INPUT);
  even_boards_turn(&alone);
  assert_int_equal(even_boards_look_ms(&alone), 0);
  json_decref(content);
}

static void all_can_go_on(void) {
  for (int rank = 0; rank < RANKS; rank++) {
    even_generation_say(rank < HERE ? leader.ranks_view : other.ranks_view, rank, "");
  }
}

static void kill_rank(size_t rank) {
  const even_process_end end = {.signal = 9};
  even_job_rank_ended(&leader.job, &leader.ranks[rank], &end);
}

static void a_rank_elsewhere_is_lost_and_the_others_go_on(void **state) {
  (void)state;
  leader.ranks[3].pid = THERE;
  all_can_go_on();
  assert_true(report());
  kill_rank(3);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  assert_false(even_generation_has(leader.ranks_view, 3, 1));
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  assert_string_equal(even_text_string(&leader.said), "generation 1: ranks 0, 1 and 2 go on without rank 3|");
}

static void ranks_elsewhere_have_time_to_say_that_they_can(void **state) {
  (void)state;
  all_can_go_on();
  kill_rank(0);
  kill_rank(1);
  even_job_shrink_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 0); /* nothing is known of 2 and 3 */
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  assert_true(report());
  even_job_shrink_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  assert_true(even_job_lost(&leader.job, 0) && even_job_lost(&leader.job, 1));
  assert_string_equal(even_text_string(&leader.said), "generation 1: ranks 2 and 3 go on without ranks 0 and 1|");
  even_job_shrink_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
}

static void who_says_nothing_in_time_ends_the_attempt(void **state) {
  (void)state;
  even_generation_say(leader.ranks_view, 1, "");
  kill_rank(0);
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  leader.job.undecided_ns = 1; /* long ago */
  even_job_shrink_tick(&leader.job);
  assert_int_equal(leader.job.stage, EVEN_JOB_TERMINATED);
  assert_true(even_generation_refused(leader.ranks_view));
  assert_false(even_job_lost(&leader.job, 0));
  assert_non_null(strstr(leader.said.data, "the others cannot go on without rank 0: rank 2: it is not training yet|"));
}

static void what_a_rank_elsewhere_cannot_is_told_at_once(void **state) {
  (void)state;
  all_can_go_on();
  even_generation_say(other.ranks_view, 3, "its data set is a stream");
  assert_true(report());
  kill_rank(0);
  assert_int_equal(leader.job.stage, EVEN_JOB_TERMINATED);
  assert_non_null(strstr(leader.said.data, "cannot go on without rank 0: rank 3: its data set is a stream|"));
}

static void a_host_is_lost_at_once(void **state) {
  (void)state;
  all_can_go_on();
  assert_true(report());
  even_job_host_ended(&leader.job, 1, "its cable is cut");
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  assert_false(even_generation_has(leader.ranks_view, 2, 1) || even_generation_has(leader.ranks_view, 3, 1));
  assert_string_equal(even_text_string(&leader.said),
                      "generation 1: ranks 0 and 1 go on without host there (ranks 2 and 3)|");
  assert_int_equal(leader.job.alive, 2);
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
}

static void who_failed_while_others_were_heard_is_the_cause(void **state) {
  (void)state;
  leader.ranks[0].pid = 70;
  leader.ranks[1].pid = 71;
  leader.ranks[1].output.rank = 1;
  even_generation_say(leader.ranks_view, 1, "");
  kill_rank(0); /* nothing is known of ranks 2 and 3 */
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  all_can_go_on();
  even_generation_say(other.ranks_view, 3, "its data set is a stream");
  assert_true(report());
  kill_rank(1);
  assert_int_equal(leader.job.stage, EVEN_JOB_TERMINATED);
  assert_non_null(strstr(leader.said.data, "|rank 0 (process 70) has ended by SIGKILL"));
}

/* From the loss of rank 3, there, to the generation that it is in again. */
static void who_takes_a_place_elsewhere_joins_those_that_stand(void **state) {
  (void)state;
  all_can_go_on();
  assert_true(report());
  kill_rank(3);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  assert_int_equal(carry(1), EVEN_OK);
  even_job_replace_tick(&leader.job); /* asks that host for a process */
  assert_true(leader.ranks[3].alive && leader.ranks[3].elsewhere && even_job_is_outside(&leader.job, 3));
  assert_int_equal(leader.job.alive, RANKS);
  assert_int_equal(leader.job.ended, 0);
  even_generation_vacate(other.job.generation, 3); /* which that one's agent does, and starts it */
  assert_true(report());
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_wished(leader.ranks_view), EVEN_WISH_NOTHING);
  even_generation_say(other.ranks_view, 3, "");
  even_generation_offer(other.ranks_view, 3);
  assert_true(report());
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_wished(leader.ranks_view), EVEN_WISH_STAND);
  assert_int_equal(carry(1), EVEN_OK);
  even_boards_turn(&other.job);
  assert_int_not_equal(even_boards_look_ms(&other.job), 0); /* rank 2 will stand without a word */
  even_generation_stand(leader.ranks_view, 0, 1);
  even_generation_stand(leader.ranks_view, 1, 1);
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  even_generation_stand(other.ranks_view, 2, 1);
  assert_true(report());
  assert_int_equal(even_boards_look_ms(&other.job), 0);
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 2);
  assert_true(even_generation_has(leader.ranks_view, 3, 2));
  assert_int_equal(even_generation_wished(leader.ranks_view), EVEN_WISH_NOTHING);
  assert_int_equal(carry(2), EVEN_OK);
  assert_true(even_generation_has(other.ranks_view, 3, 2));
  assert_non_null(strstr(leader.said.data, "generation 2: rank 3 joins ranks 0, 1 and 2|"));
}

/* Before anybody looked: to the other host's agent nothing has changed. */
static void who_takes_a_place_is_heard_where_it_says_the_same(void **state) {
  even_generation_words words;
  (void)state;
  all_can_go_on();
  assert_true(report());
  even_boards_vacate(&leader.job, 3);
  even_boards_vacate(&other.job, 3);
  even_generation_say(other.ranks_view, 3, "");
  assert_true(report());
  even_generation_hear(leader.job.generation, 3, &words);
  assert_true(words.said);
  assert_false(report());
  even_boards_vacate(&leader.job, 3);
  assert_int_equal(give(true, "{\"ranks\":[{\"rank\":3,\"said\":true,\"why\":\"\",\"offers\":true}]}"), EVEN_OK);
  even_generation_offer(other.ranks_view, 3); /* what the one before had said came late */
  even_boards_vacate(&other.job, 3);
  assert_true(report());
  assert_false(even_generation_offers(leader.job.generation, 3));
}

/* The other host's ranks are lost, and others offer themselves in their places: up to the generation that has these. */
static void fill_the_other_host(void) {
  all_can_go_on();
  assert_true(report());
  kill_rank(2);
  kill_rank(3);
  assert_int_equal(carry(1), EVEN_OK);
  assert_int_equal(carry(2), EVEN_OK);
  even_job_replace_tick(&leader.job);
  for (int rank = HERE; rank < RANKS; rank++) {
    assert_true(leader.ranks[rank].alive && even_job_is_outside(&leader.job, (size_t)rank));
    even_boards_vacate(&other.job, (size_t)rank);
    even_generation_say(other.ranks_view, rank, "");
    even_generation_offer(other.ranks_view, rank);
  }
  assert_true(report());
  even_generation_stand(leader.ranks_view, 0, 2);
  even_generation_stand(leader.ranks_view, 1, 2);
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 3);
}

static void where_nobody_is_left_the_state_comes_from_another_host(void **state) {
  (void)state;
  fill_the_other_host();
  assert_true(even_generation_gives_away(leader.ranks_view, 0, 3));
  assert_false(even_generation_gives_away(leader.ranks_view, 1, 3));
  assert_true(even_gifts_travel(&leader.job) && even_gifts_await(&leader.job));
  assert_int_equal(carry(3), EVEN_OK);
  assert_true(even_gifts_travel(&other.job));
  assert_false(even_gifts_await(&other.job));
  kill_rank(0); /* who gives: another one does, in another generation */
  assert_int_equal(even_generation_number(leader.ranks_view), 4);
  assert_true(even_generation_gives_away(leader.ranks_view, 1, 4));
  assert_int_equal(carry(4), EVEN_OK);
  even_generation_take(other.ranks_view, 2, 4);
  assert_true(report());
  even_boards_turn(&leader.job);
  assert_true(even_gifts_travel(&leader.job)); /* rank 3 has not */
  even_generation_take(other.ranks_view, 3, 4);
  assert_true(report());
  even_boards_turn(&leader.job);
  assert_false(even_gifts_travel(&leader.job));
  assert_int_equal(carry(4), EVEN_OK);
  assert_false(even_gifts_travel(&other.job));
}

static void who_came_and_has_the_state_gives_it_to_others(void **state) {
  const bool nobody[RANKS] = {false, false, false, false};
  (void)state;
  fill_the_other_host();
  assert_int_equal(carry(3), EVEN_OK);
  even_generation_stand(other.ranks_view, 2, 3); /* it has made a step since */
  assert_true(report());
  assert_true(even_job_has_state(&leader.job, 2));
  assert_false(even_job_has_state(&leader.job, 3));
  even_gifts_plan(&leader.job);
  assert_int_equal(even_generation_lose(leader.job.generation, nobody), 4);
  assert_false(even_gifts_travel(&leader.job)); /* rank 3 gets it from rank 2 */
}

static void why_the_state_does_not_come_is_told_where_it_is_waited_for(void **state) {
  char why[EVEN_GENERATION_WORDS];
  (void)state;
  fill_the_other_host();
  assert_int_equal(carry(3), EVEN_OK);
  assert_int_equal(give(false, "{\"number\":3,\"ungiven\":[{\"host\":0,\"why\":\"of another one\"}]}"), EVEN_OK);
  assert_false(even_generation_ungiven(other.ranks_view, 3, why));
  assert_int_equal(give(false, "{\"number\":3,\"ungiven\":[{\"host\":1,\"why\":\"no memory is free\"}]}"), EVEN_OK);
  assert_true(even_generation_ungiven(other.ranks_view, 3, why));
  assert_string_equal(why, "no memory is free");

  kill_rank(0);
  kill_rank(1); /* nobody has the state any more */
  assert_int_equal(leader.job.stage, EVEN_JOB_RUNS);
  assert_false(even_gifts_travel(&leader.job));
}

/* A rank of the other host gives, to newcomers here. */
static void a_host_says_where_it_could_not_send_the_state(void **state) {
  static const char *const odd = "{\"gift\":3,\"ungiven\":[{\"host\":2,\"why\":\"\"}]}";
  char why[EVEN_GENERATION_WORDS];
  (void)state;
  all_can_go_on();
  assert_true(report());
  kill_rank(0);
  kill_rank(1);
  for (int rank = 0; rank < HERE; rank++) { /* as if they were started */
    leader.ranks[rank].alive = true;
    even_generation_offer(leader.ranks_view, rank);
    even_generation_stand(other.ranks_view, HERE + rank, 2);
  }
  leader.job.alive = RANKS;
  assert_int_equal(carry(1), EVEN_OK);
  assert_int_equal(carry(2), EVEN_OK);
  assert_true(report());
  even_job_replace_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 3);
  assert_int_equal(carry(3), EVEN_OK);
  assert_true(even_generation_gives_away(other.ranks_view, 2, 3) && even_gifts_await(&other.job));
  assert_int_not_equal(even_boards_look_ms(&other.job), 0);
  assert_int_equal(give(true, odd), EVEN_ERR_INPUT);
  assert_int_equal(give(true, "{\"gift\":2,\"ungiven\":[{\"host\":0,\"why\":\"late\"}]}"), EVEN_OK);
  assert_false(even_generation_ungiven(leader.ranks_view, 3, why));
  assert_int_equal(give(true, "{\"gift\":3,\"ungiven\":[{\"host\":0,\"why\":\"it broke\"}]}"), EVEN_OK);
  assert_true(even_generation_ungiven(leader.ranks_view, 3, why));
  assert_string_equal(why, "it broke");
  assert_non_null(strstr(
      leader.said.data, "host here does not get the state of the training that rank 2 on host there gives: it broke|"));
}

static void who_cannot_give_says_why_to_those_that_wait(void **state) {
  char why[EVEN_GENERATION_WORDS];
  (void)state;
  fill_the_other_host();
  even_generation_fail_bringing(leader.ranks_view, 3, "rank 0 cannot give it: no memory");
  even_boards_turn(&leader.job);
  assert_non_null(strstr(leader.said.data,
                         "host there does not get the state of the training that rank 0 on host here "
                         "gives: rank 0 cannot give it: no memory|"));
  assert_int_equal(carry(3), EVEN_OK);
  assert_true(even_generation_ungiven(other.ranks_view, 3, why));
  assert_string_equal(why, "rank 0 cannot give it: no memory");
}

/* A rank that was stopped goes on before one that joined had the state: all of it is made again. */
static void who_goes_on_in_time_keeps_nobody_from_the_state(void **state) {
  (void)state;
  fill_the_other_host();
  assert_int_equal(carry(3), EVEN_OK);
  even_job_rank_continues(&leader.job, &leader.ranks[1]);
  even_generation_doubt(leader.ranks_view, 0, 3);
  even_job_stands_tick(&leader.job);
  assert_int_equal(even_generation_number(leader.ranks_view), 4);
  assert_true(even_generation_gives_away(leader.ranks_view, 0, 4) && even_gifts_travel(&leader.job));
  assert_int_equal(carry(4), EVEN_OK);
  assert_true(even_gifts_travel(&other.job));
}

static time_t ahead_s;

static int clock_ahead(clockid_t clock, struct timespec *out) {
  int done = even_os_real.clock_gettime(clock, out);
  out->tv_sec += ahead_s;
  return done;
}

static void who_gives_nothing_for_long_is_looked_at_again(void **state) {
  (void)state;
  fill_the_other_host();
  assert_int_equal(carry(3), EVEN_OK);
  assert_true(even_gifts_hold_up(&leader.job) && even_gifts_hold_up(&other.job));
  ahead_s = 61;
  even_os.clock_gettime = clock_ahead;
  assert_false(even_gifts_hold_up(&leader.job)); /* rank 0, and who waits with it */
  assert_true(even_gifts_hold_up(&other.job));
  even_os.clock_gettime = even_os_real.clock_gettime;
}

static void who_joined_lacks_the_state_until_it_took_it(void **state) {
  (void)state;
  fill_the_other_host();
  assert_false(even_gifts_any_lacks(&other.job)); /* nobody there knows yet that they joined */
  assert_int_equal(carry(3), EVEN_OK);
  assert_true(even_gifts_any_lacks(&other.job));
  assert_false(even_gifts_any_lacks(&leader.job));
  even_generation_take(other.ranks_view, 2, 3);
  assert_true(even_gifts_any_lacks(&other.job));
  even_generation_take(other.ranks_view, 3, 3);
  assert_false(even_gifts_any_lacks(&other.job));
}

static void plans_of_ranks_and_hosts_that_are_none_are_refused(void **state) {
  static const char *const plans[] = {
      "{\"number\":1,\"members\":[0],\"giver\":4}",
      "{\"number\":1,\"members\":[0],\"giver\":\"0\"}",
      "{\"number\":1,\"members\":[0],\"giver\":0,\"gives_to\":[2]}",
      "{\"number\":1,\"members\":[0],\"ungiven\":[{\"host\":-1,\"why\":\"\"}]}",
  };
  (void)state;
  for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
    even_boards_begin(&other.job);
    assert_int_equal(even_gifts_begin(&other.job), EVEN_OK);
    assert_int_equal(give(false, plans[i]), EVEN_ERR_INPUT);
    assert_int_equal(even_generation_number(other.ranks_view), 0);
  }
}

/* Its agent was started again: its board begins where the others are, once it has said that it can follow. */
static void a_host_that_comes_back_follows_from_where_the_others_are(void **state) {
  (void)state;
  all_can_go_on();
  assert_true(report());
  even_job_host_ended(&leader.job, 1, "its cable is cut");
  leader.agents[1].follows = false;
  leader.link.fd = -1;
  even_job_replace_tick(&leader.job);
  assert_false(leader.ranks[2].alive); /* nobody there can be asked */
  other.job.late = true;
  assert_int_equal(even_job_generations_begin(&other.job), EVEN_OK);
  assert_true(even_job_is_outside(&other.job, 2) && even_job_is_outside(&other.job, 3));
  assert_false(even_generation_has(other.ranks_view, 0, 0));
  leader.agents[1].link = NULL; /* nothing is sent by it here */
  assert_true(report());
  leader.agents[1].link = &leader.link;
  assert_true(leader.agents[1].follows);
  assert_true(even_job_host_reached(&leader.job, 2));
  assert_false(report());
  const bool nobody[RANKS] = {false, false, false, false};
  assert_int_equal(even_generation_lose(leader.job.generation, nobody), 2);
  assert_int_equal(carry(2), EVEN_OK);
  assert_int_equal(even_generation_number(other.ranks_view), 2);
  assert_true(even_generation_has(other.ranks_view, 1, 2));
  assert_int_equal(even_generation_lose(leader.job.generation, nobody), 3);
  assert_int_equal(even_generation_lose(leader.job.generation, nobody), 4);
  assert_int_equal(carry(4), EVEN_ERR_INPUT); /* from then on one by one */
}

/* It joins where nobody was lost: its ranks must know who was there before them, who alone has a state to give. */
static void a_host_that_joins_knows_who_began(void **state) {
  const bool joins[RANKS] = {false, false, true, false};
  const bool nobody[RANKS] = {false};
  (void)state;
  even_generation_begin(leader.job.generation, (const bool[RANKS]){true, true, false, false});
  other.job.late = true;
  assert_int_equal(even_job_generations_begin(&other.job), EVEN_OK);
  assert_false(even_generation_has(other.ranks_view, 0, 0));
  assert_int_equal(carry(0), EVEN_OK);
  assert_true(even_generation_has(other.ranks_view, 0, 0) && even_generation_has(other.ranks_view, 1, 0));
  assert_int_equal(even_generation_grow(leader.job.generation, joins), 1);
  assert_int_equal(carry(1), EVEN_OK);
  assert_true(even_generation_has(other.ranks_view, 2, 1) && even_generation_has(other.ranks_view, 0, 0));
  assert_false(even_job_is_outside(&other.job, 2));
  assert_int_equal(even_generation_lose(leader.job.generation, nobody), 2);
  assert_int_equal(carry(0), EVEN_OK); /* an old one: nothing */
  assert_int_equal(even_generation_number(other.ranks_view), 1);
}

/* Ranks 0 here and 1 there, and a spare of each host: 2 and 3. */
static void who_waits_on_the_host_of_a_lost_rank_comes_first(void **state) {
  (void)state;
  leader.params.spares = 2;
  leader.job.local = leader.agents[1].count = 1;
  leader.agents[1].first = 1;
  leader.job.first_spare = 2;
  leader.agents[1].first_spare = 3;
  leader.job.spares = leader.agents[1].spares = 1;
  assert_int_equal(even_job_generations_begin(&leader.job), EVEN_OK);
  assert_true(even_job_is_here(&leader.job, 2) && !even_job_is_here(&leader.job, 1));
  assert_int_equal(even_job_host_number(&leader.job, 3), 1);
  for (int rank = 0; rank < RANKS; rank++) {
    even_generation_say(leader.ranks_view, rank, "");
  }
  even_generation_offer(leader.ranks_view, 2);
  even_generation_offer(leader.ranks_view, 3);
  kill_rank(1);
  even_generation_stand(leader.ranks_view, 0, 1);
  even_job_replace_tick(&leader.job);
  assert_true(even_generation_has(leader.ranks_view, 3, 2));
  assert_false(even_generation_has(leader.ranks_view, 2, 2));
  assert_non_null(strstr(leader.said.data, "generation 2: rank 3 joins rank 0|"));
  even_generation_stand(leader.ranks_view, 0, 2);
  kill_rank(3); /* none of that host offers itself now */
  even_generation_stand(leader.ranks_view, 0, 3);
  even_job_replace_tick(&leader.job);
  assert_true(even_generation_has(leader.ranks_view, 2, 4));
}

static void the_least_are_not_waited_for_where_they_cannot_come(void **state) {
  (void)state;
  leader.params.least_ranks = 3;
  all_can_go_on();
  assert_true(report());
  kill_rank(1); /* rank 0 could give another one its state */
  assert_int_equal(even_generation_number(leader.ranks_view), 1);
  leader.agents[1].busy = false; /* a lost host's places are free when it is back, and not before */
  even_job_host_ended(&leader.job, 1, "its cable is cut");
  assert_int_equal(leader.job.stage, EVEN_JOB_TERMINATED);
  assert_non_null(strstr(leader.said.data,
                         "cannot go on without host there (ranks 2 and 3): 1 are left, and "
                         "--min-ranks is 3; only 1 can join them|"));
}

static void only_a_free_place_of_this_host_is_filled(void **state) {
  (void)state;
  assert_int_equal(even_job_replace_fill(&other.job, 0), EVEN_ERR_INPUT);     /* of another host */
  assert_int_equal(even_job_replace_fill(&other.job, HERE), EVEN_ERR_INPUT);  /* it lives */
  assert_int_equal(even_job_replace_fill(&other.job, RANKS), EVEN_ERR_INPUT); /* there is none */
  assert_true(even_job_replace_waits(&other.job));
  assert_false(even_job_replace_waits(&leader.job));
}

static even_status open_and_follow(void *context) {
  (void)context;
  even_status status = open_side(&other, false);
  if (status == EVEN_OK) {
    json_t *content = json_pack("{s:i,s:[i]}", "number", 1, "members", 2);
    status = even_boards_follow(&other.job, content);
    json_decref(content);
  }
  if (status == EVEN_OK && even_generation_number(other.ranks_view) != 1) {
    status = even_fail(EVEN_ERR_INPUT, "it did not follow");
  }
  close_side(&other);
  return status;
}

static void lack_of_memory_is_told(void **state) {
  (void)state;
  close_side(&other);
  assert_in_range(fault_each_allocation(open_and_follow, NULL), 4, 100);
}

int main(void) {
#define BOARD_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define REPLACING_TEST(name) cmocka_unit_test_setup_teardown(name, set_up_replacing, tear_down)
  const struct CMUnitTest tests[] = {
      BOARD_TEST(what_ranks_say_elsewhere_decides_here),
      BOARD_TEST(generations_come_one_by_one),
      BOARD_TEST(members_meet_where_the_first_of_them_is),
      BOARD_TEST(odd_words_are_refused),
      BOARD_TEST(a_rank_elsewhere_is_lost_and_the_others_go_on),
      BOARD_TEST(ranks_elsewhere_have_time_to_say_that_they_can),
      BOARD_TEST(who_says_nothing_in_time_ends_the_attempt),
      BOARD_TEST(what_a_rank_elsewhere_cannot_is_told_at_once),
      BOARD_TEST(a_host_is_lost_at_once),
      BOARD_TEST(who_failed_while_others_were_heard_is_the_cause),
      REPLACING_TEST(who_takes_a_place_elsewhere_joins_those_that_stand),
      REPLACING_TEST(who_takes_a_place_is_heard_where_it_says_the_same),
      REPLACING_TEST(where_nobody_is_left_the_state_comes_from_another_host),
      REPLACING_TEST(who_came_and_has_the_state_gives_it_to_others),
      REPLACING_TEST(why_the_state_does_not_come_is_told_where_it_is_waited_for),
      REPLACING_TEST(a_host_says_where_it_could_not_send_the_state),
      REPLACING_TEST(who_cannot_give_says_why_to_those_that_wait),
      REPLACING_TEST(who_goes_on_in_time_keeps_nobody_from_the_state),
      REPLACING_TEST(who_gives_nothing_for_long_is_looked_at_again),
      REPLACING_TEST(who_joined_lacks_the_state_until_it_took_it),
      REPLACING_TEST(plans_of_ranks_and_hosts_that_are_none_are_refused),
      REPLACING_TEST(a_host_that_comes_back_follows_from_where_the_others_are),
      REPLACING_TEST(a_host_that_joins_knows_who_began),
      REPLACING_TEST(who_waits_on_the_host_of_a_lost_rank_comes_first),
      REPLACING_TEST(the_least_are_not_waited_for_where_they_cannot_come),
      REPLACING_TEST(only_a_free_place_of_this_host_is_filled),
      BOARD_TEST(lack_of_memory_is_told),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
