/* The list of a job's hosts while some leave, and hosts that come or keep the job waiting, without any process that
 * plays one: an agent here is what stands of it in the list, its shell a `cat`. */
#include "orchestrator/elastic.h"

#include "an_agent.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/bring.h"
#include "orchestrator/legacy.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/port.h"

#include <evenstep/version.h>
#include <math.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

enum { GUESTS = 3 };

typedef struct scene {
  even_hosts hosts;
  even_job job;
  even_agent_params params;
  even_device device; /* without a core: no place is left here */
  even_device_list devices;
  even_loop_watch watch;
  int held; /* ends the shell of the host that leaves when it is closed */
  even_legacy legacy;
  char told[512];
} scene;

static void keep_notice(void *context, const char *text) {
  scene *at = context;
  (void)snprintf(at->told, sizeof at->told, "%s", text);
}

/* A job on `here`, x, y and z. */
static int open_scene(void **state) {
  static const char *const names[] = {"here", "x", "y", "z"};
  scene *at = NULL;
  assert_int_equal(EVEN_NEW(&at), EVEN_OK);
  at->params.observer.context = at;
  at->params.observer.notice = keep_notice;
  at->devices = (even_device_list){&at->device, 1};
  at->params.devices = &at->devices;
  at->job = (even_job){.params = &at->params, .hosts = &at->hosts, .local = 1};
  at->hosts = (even_hosts){.count = 4,
                           .room = 4,
                           .job = &at->job,
                           .listener = -1,
                           .listen_ns = UINT64_MAX,
                           .listener_watch = {.fd = -1},
                           .params = {.patience_seconds = 600}};
  at->watch.fd = -1;
  assert_int_equal(even_loop_open(&at->hosts.loop), EVEN_OK);
  assert_int_equal(even_elastic_open(&at->hosts), EVEN_OK);
  assert_int_equal(EVEN_NEW_ARRAY(&at->hosts.agents, 4), EVEN_OK);
  for (size_t i = 0; i < 4; i++) {
    at->hosts.agents[i] = an_agent(&at->hosts, i, names[i]);
  }
  assert_int_equal(even_hosts_open_parcels(&at->hosts), EVEN_OK);
  *state = at;
  return 0;
}

static int close_scene(void **state) {
  scene *at = *state;
  for (size_t i = 0; i < at->hosts.count; i++) {
    even_free(at->hosts.agents[i].link);
  }
  even_elastic_close(&at->hosts);
  even_free(at->hosts.elastic);
  even_parcels_close(at->hosts.parcels);
  even_free(at->hosts.agents);
  even_loop_close(&at->hosts.loop);
  even_free(at);
  return 0;
}

static void add_guest(scene *at, size_t place, const char *name) {
  even_host_agent **guest = &at->hosts.elastic->guests[place];
  assert_int_equal(EVEN_NEW(guest), EVEN_OK);
  **guest = an_agent(&at->hosts, at->hosts.count + place, name);
  (*guest)->came = true;
  assert_int_equal(EVEN_NEW(&(*guest)->link), EVEN_OK);
  (*guest)->link->fd = -1; /* nothing comes by it */
}

/* Whether the agent that is started in this one's place, were it killed now, has that host. */
static bool would_have(const scene *at, const char *name, bool away) {
  size_t count = 0;
  const even_legacy_host *hosts = even_legacy_hosts(&at->legacy, &count);
  bool found = false;
  for (size_t i = 0; i < count; i++) {
    found = found || (strcmp(hosts[i].name, name) == 0 && hosts[i].away == away);
  }
  return found;
}

/* While z leaves: y is drained, x is lost, and hosts come. */
static void much_happens(void *context, int fd) {
  static const char *const names[GUESTS] = {"u", "v", "w"};
  scene *at = context;
  assert_false(would_have(at, "z", false) || would_have(at, "z", true)); /* before it is told to go */
  assert_true(would_have(at, "x", false) && would_have(at, "y", false));
  even_loop_remove(&at->hosts.loop, &at->watch);
  even_pipe_close(fd);
  for (size_t i = 0; i < GUESTS; i++) {
    add_guest(at, i, names[i]);
  }
  for (size_t i = 1; i < at->hosts.count; i++) {
    even_host_agent *agent = &at->hosts.agents[i];
    agent->leaves = agent->leaves || strcmp(agent->name, "y") == 0;
    agent->lost = strcmp(agent->name, "x") == 0;
  }
  even_pipe_close(at->held);
}

static void start_shell(scene *at, even_host_agent *agent) {
  char cat[] = "cat";
  char *words[] = {cat, NULL};
  char *nothing[] = {NULL};
  int input[2];
  assert_int_equal(even_pipe_pair(input), EVEN_OK);
  const even_process_params params = {.arguments = words, .environment = nothing, .input = input[0]};
  assert_int_equal(even_process_start(&params, &agent->shell), EVEN_OK);
  even_pipe_close(input[0]);
  even_pipe_close(agent->shell.output);
  even_pipe_close(agent->shell.error);
  at->held = input[1];
}

static void heard(void *context, int fd) {
  const even_host_agent *agent = context;
  char one = 0;
  assert_int_equal(read(fd, &one, 1), 1);
  assert_string_equal(agent->name, "x");
  assert_ptr_equal(agent, &agent->hosts->agents[1]);
  agent->hosts->job->attempt++;
}

static void what_comes_while_a_host_leaves_is_kept(void **state) {
  scene *at = *state;
  int wake[2];
  int said[2];
  assert_int_equal(even_pipe_pair(wake), EVEN_OK);
  assert_int_equal(even_pipe_pair(said), EVEN_OK);
  start_shell(at, &at->hosts.agents[3]);
  at->hosts.agents[3].leaves = true;
  assert_int_equal(
      even_loop_add(&at->hosts.loop, &at->hosts.agents[1].watches[0], said[0], heard, &at->hosts.agents[1]), EVEN_OK);
  assert_int_equal(even_loop_add(&at->hosts.loop, &at->watch, wake[0], much_happens, at), EVEN_OK);
  assert_int_equal(write(wake[1], "!", 1), 1);
  assert_int_equal(even_legacy_open(&at->legacy), EVEN_OK);
  assert_int_equal(even_legacy_leave(&at->legacy, &at->job), EVEN_OK);
  at->params.legacy = &at->legacy;
  assert_true(would_have(at, "z", false));
  assert_int_equal(even_elastic_rearrange(&at->job), EVEN_OK);
  assert_true(would_have(at, "x", false) && !would_have(at, "y", false));
  even_legacy_close(&at->legacy);

  static const char *const names[] = {"here", "x", "u", "v", "w"};
  assert_int_equal(at->hosts.count, 2 + GUESTS);
  for (size_t i = 0; i < at->hosts.count; i++) {
    assert_string_equal(at->hosts.agents[i].name, names[i]);
    assert_int_equal(at->hosts.agents[i].index, i);
    assert_false(at->hosts.agents[i].leaves);
  }
  assert_true(at->hosts.agents[1].lost);
  assert_null(at->hosts.elastic->guests[0]);
  assert_int_equal(write(said[1], "!", 1), 1); /* what watches x knows where it lies now */
  assert_int_equal(even_loop_turn(&at->hosts.loop, 60000), EVEN_OK);
  assert_int_equal(at->job.attempt, 1);
  even_loop_remove(&at->hosts.loop, &at->hosts.agents[1].watches[0]);
  even_pipe_close(said[0]);
  even_pipe_close(said[1]);
  even_pipe_close(wake[1]);
}

/* How many times another attempt follows while y is lost in each. */
static int count_tries(scene *at) {
  int tries = 0;
  at->hosts.agents[2].lost = true;
  (void)snprintf(at->hosts.agents[2].lost_words, sizeof at->hosts.agents[2].lost_words, "cut");
  while (tries < 100 && !at->hosts.agents[2].leaves && even_elastic_tries_again(&at->job, EVEN_ERR_PEER_LOST)) {
    tries++;
  }
  return tries;
}

static void who_keeps_attempts_from_beginning_is_left_out(void **state) {
  scene *at = *state;
  at->hosts.params.least_ranks = 1;
  assert_int_equal(count_tries(at), 4);
  assert_true(at->hosts.agents[2].leaves);
  assert_false(at->hosts.agents[1].leaves);
  assert_string_equal(at->told, "host y is left out: 4 attempts in a row could not begin for want of it: cut");
}

/* The error of the fourth is the job's. */
static void without_whom_the_job_cannot_go_on_is_not_waited_for_forever(void **state) {
  scene *at = *state;
  at->hosts.params.most_ranks = 8;
  assert_int_equal(count_tries(at), 3);
  assert_false(at->hosts.agents[2].leaves);
}

static void who_came_and_is_lost_is_not_counted_nor_started(void **state) {
  scene *at = *state;
  even_host_agent *agent = &at->hosts.agents[2];
  assert_int_equal(even_elastic_ranks(&at->job), 4);
  agent->lost = true;
  assert_int_equal(even_elastic_ranks(&at->job), 4);
  agent->came = true;
  assert_int_equal(even_elastic_ranks(&at->job), 3);
  char *const shell[] = {(char *)(uintptr_t)"/nonexistent/shell", NULL};
  at->hosts.params.shell = shell;
  assert_int_equal(even_host_agent_launch(agent), EVEN_ERR_PEER_LOST);
  assert_int_equal(agent->shell.pid, -1);
}

static void a_guest_that_says_nothing_gives_its_place_back(void **state) {
  scene *at = *state;
  add_guest(at, 0, "silent");
  even_host_agent *guest = at->hosts.elastic->guests[0];
  guest->fits = false;
  guest->asked_ns = even_clock_ns();
  even_guests_tick(&at->hosts);
  assert_non_null(at->hosts.elastic->guests[0]);
  at->hosts.params.patience_seconds = 0;
  even_guests_tick(&at->hosts);
  assert_null(at->hosts.elastic->guests[0]);
  even_free(at->hosts.gone);
  at->hosts.gone = NULL;
}

/* The last one would be taken, but this host has not begun: it is told to ask again. */
static void who_joins_with_another_version_is_refused(void **state) {
  scene *at = *state;
  const char *const versions[] = {"0.0.1", even_version(), even_version(), even_version()};
  const int protocols[] = {EVEN_MESSAGE_PROTOCOL, EVEN_MESSAGE_PROTOCOL - 1, EVEN_MESSAGE_PROTOCOL,
                           EVEN_MESSAGE_PROTOCOL};
  const size_t bytes[] = {sizeof(even_record), sizeof(even_record), 1, sizeof(even_record)};
  even_link link = {.fd = -1, .peer = "10.0.0.9"};
  at->hosts.params.most_ranks = 8;
  at->hosts.params.program = "/usr/bin/evenstep";
  at->hosts.job = NULL;
  for (size_t i = 0; i < 4; i++) {
    json_t *greeting = json_pack("{s:s,s:i,s:I,s:b,s:i}", "evenstep", versions[i], "protocol", protocols[i],
                                 "record_bytes", (json_int_t)bytes[i], "joins", 1, "ranks", 1);
    assert_non_null(greeting);
    assert_int_equal(even_guests_greet(&at->hosts, &link, greeting), i < 3 ? EVEN_ERR_UNSUPPORTED : EVEN_OK);
    if (i < 3) {
      assert_non_null(strstr(even_error_last()->what, "host 10.0.0.9 has evenstep "));
      assert_non_null(strstr(even_error_last()->fix, "install one version on all hosts; /usr/bin/evenstep "));
    }
    even_error_clear();
    assert_null(at->hosts.elastic->guests[0]);
    json_decref(greeting);
  }
}

static void only_who_may_be_there_again_is_waited_for(void **state) {
  scene *at = *state;
  char *const shell[] = {(char *)(uintptr_t)"/nonexistent/shell", NULL};
  at->hosts.params.least_ranks = 4;
  at->hosts.params.least_seconds = (double)INFINITY;
  even_elastic_leave_out(&at->job, &at->hosts.agents[1], "cut");
  assert_string_equal(at->told, "host x is left out: cut");
  assert_int_equal(even_elastic_next_ranks(&at->job), 3);
  assert_false(even_elastic_may_wait(&at->job)); /* nobody here can start it */
  assert_int_equal(even_elastic_too_few(&at->job, 0), EVEN_ERR_PEER_LOST);
  assert_string_equal(even_error_last()->what,
                      "3 ranks are left on the hosts that can be reached, and --min-ranks is 4");
  even_error_clear();
  at->hosts.params.most_ranks = 8;
  assert_true(even_elastic_may_wait(&at->job)); /* others may join */
  at->hosts.params.most_ranks = 0;
  at->hosts.params.shell = shell;
  at->hosts.agents[2].came = true;
  even_elastic_leave_out(&at->job, &at->hosts.agents[2], "cut");
  assert_false(even_elastic_may_wait(&at->job));
  even_elastic_leave_out(&at->job, &at->hosts.agents[3], "cut");
  assert_true(even_elastic_may_wait(&at->job));
  at->hosts.params.least_seconds = 0;
  assert_false(even_elastic_may_wait(&at->job)); /* the user does not want it */
}

/* ---- ranks of a host that is drained ---- */

static even_status drain(scene *at, size_t host, const char *command) {
  json_t *words = json_loads(command, 0, NULL);
  assert_non_null(words);
  even_status status = even_move_begin(&at->job, &at->hosts.agents[host], words);
  json_decref(words);
  return status;
}

static void refused(scene *at, even_status wanted, const char *why, const char *command) {
  assert_int_equal(drain(at, 2, command), wanted);
  assert_non_null(strstr(even_error_last()->what, why));
  assert_false(even_move_prepares(&at->job));
  assert_null(at->hosts.elastic->guests[0]);
  even_error_clear();
}

static void what_cannot_take_ranks_is_refused(void **state) {
  scene *at = *state;
  at->hosts.agents[3].lost = true;
  at->hosts.params.least_ranks = 4;
  refused(at, EVEN_ERR_STATE, "without host y 3 ranks would be left, and --min-ranks is 4", "{}");
  refused(at, EVEN_ERR_NOT_FOUND, "the job has no host u, and reaches none by ssh",
          "{\"to\":[{\"host\":\"u\",\"ranks\":0}]}");
  refused(at, EVEN_ERR_USAGE, "host y is to be drained, and to take ranks", "{\"to\":[{\"host\":\"y\",\"ranks\":0}]}");
  refused(at, EVEN_ERR_USAGE, "--to has places for 2 ranks, and 1 leaves", "{\"to\":[{\"host\":\"x\",\"ranks\":2}]}");
  refused(at, EVEN_ERR_STATE, "host z is about to leave the job itself", "{\"to\":[{\"host\":\"z\",\"ranks\":1}]}");
  refused(at, EVEN_ERR_USAGE, "names host x twice",
          "{\"to\":[{\"host\":\"x\",\"ranks\":1},{\"host\":\"x\",\"ranks\":0}]}");
  refused(at, EVEN_ERR_USAGE, "is not the name of a host", "{\"to\":[{\"host\":\"-oProxyCommand=x\",\"ranks\":1}]}");
  refused(at, EVEN_ERR_USAGE, "cannot take -1 ranks", "{\"to\":[{\"host\":\"x\",\"ranks\":-1}]}");
}

static void gpus_are_not_shared_nor_exchanged_for_cores(void **state) {
  scene *at = *state;
  even_device gpu = {.kind = EVEN_DEVICE_CUDA};
  even_device core = {.kind = EVEN_DEVICE_CPU, .cores = 1};
  for (size_t i = 1; i < 4; i++) {
    at->hosts.agents[i].devices = (even_device_list){i == 3 ? &core : &gpu, 1};
    at->hosts.agents[i].places = i == 1 ? 1 : 8;
  }
  refused(at, EVEN_ERR_DEVICE, "host x has 1 GPU, and would have 2 ranks", "{\"to\":[{\"host\":\"x\",\"ranks\":1}]}");
  assert_int_equal(drain(at, 2, "{}"), EVEN_OK); /* z has cores left alone, x no GPU */
  assert_non_null(strstr(at->told, "of host y no rank moves"));
  even_move_settle(&at->job);
  at->hosts.agents[1].places = 2;
  assert_int_equal(drain(at, 2, "{}"), EVEN_OK);
  assert_non_null(strstr(at->told, "of host y 1 of 1 rank moves: to x (1)"));
  for (size_t i = 1; i < 4; i++) {
    at->hosts.agents[i].devices = (even_device_list){NULL, 0};
  }
}

/* An answer to the draining of that number. */
static void host_says_of(scene *at, size_t host, int64_t number, const char *said) {
  json_t *content = json_loads(said, 0, NULL);
  assert_non_null(content);
  assert_int_equal(json_object_set_new(content, "number", json_integer(number)), 0);
  at->hosts.agents[host].next.asked = true;
  even_move_hear(&at->hosts.agents[host], content);
  json_decref(content);
}

static void host_says(scene *at, size_t host, const char *said) {
  host_says_of(at, host, at->hosts.elastic->move.number, said);
}

/* x takes the rank of y, which leaves: what was prepared holds once the list is another one. */
static void what_was_prepared_holds_when_the_hosts_have_changed(void **state) {
  scene *at = *state;
  even_device_list own;
  assert_int_equal(drain(at, 2, "{\"to\":[{\"host\":\"x\",\"ranks\":0}]}"), EVEN_OK);
  assert_non_null(strstr(at->told, "of host y 1 of 1 rank moves: to x (1)"));
  assert_true(even_move_prepares(&at->job));
  assert_int_equal(even_elastic_ranks(&at->job), 4); /* nothing has changed yet */
  host_says(at, 1, "{\"devices\":[{\"name\":\"cpu:0\"},{\"name\":\"cpu:1\"}]}");
  assert_int_equal(even_move_ranks(&at->job, 1), 1);
  assert_int_equal(even_elastic_ranks(&at->job), 4); /* nor now: y may yet stay */
  at->hosts.elastic->move.stage = EVEN_MOVE_ASKED;
  at->hosts.agents[2].leaves = true;
  assert_int_equal(even_move_ranks(&at->job, 1), 2);
  assert_int_equal(even_elastic_ranks(&at->job), 4); /* two of x, one of z, one of this host */
  assert_int_equal(even_elastic_rearrange(&at->job), EVEN_OK);
  assert_int_equal(at->hosts.count, 3);
  assert_string_equal(at->hosts.agents[1].name, "x");
  assert_int_equal(at->hosts.agents[1].count, 2);
  assert_int_equal(at->hosts.agents[1].wish, 2);
  assert_string_equal(at->hosts.agents[1].devices.items[1].name, "cpu:1");
  assert_int_equal(at->hosts.agents[2].count, 1);
  assert_false(even_move_prepares(&at->job));
  assert_false(even_hosts_own_devices(&at->hosts, &own)); /* this host's are as they were */
  even_device_list_free(&at->hosts.agents[1].devices);
}

static void who_names_other_devices_than_asked_is_not_believed(void **state) {
  scene *at = *state;
  assert_int_equal(drain(at, 2, "{\"to\":[{\"host\":\"x\",\"ranks\":0}]}"), EVEN_OK);
  host_says(at, 1, "{\"devices\":[{\"name\":\"cpu:0\"}]}");
  assert_false(at->hosts.agents[1].next.placed);
  even_move_tick(&at->job);
  assert_string_equal(at->told,
                      "host y is not drained, and the job goes on as it is: host x names 1 devices for 2 ranks");
  assert_false(at->hosts.agents[1].lost);
}

/* Of the one that was given up nothing is believed, and nothing held against the host, when the next one is begun. */
static void an_answer_that_comes_late_is_none_to_the_next_question(void **state) {
  scene *at = *state;
  static const char *const to_x = "{\"to\":[{\"host\":\"x\",\"ranks\":0}]}";
  assert_int_equal(drain(at, 2, to_x), EVEN_OK);
  int64_t first = at->hosts.elastic->move.number;
  even_move_settle(&at->job);
  assert_int_equal(drain(at, 2, to_x), EVEN_OK);
  host_says_of(at, 1, first, "{\"devices\":[{\"name\":\"cpu:0\"},{\"name\":\"cpu:1\"}]}");
  host_says_of(at, 1, first, "{\"devices\":[]}");
  host_says_of(at, 1, first, "{\"status\":5,\"what\":\"no such device\",\"fix\":\"\"}");
  host_says_of(at, 1, first, "{\"waiting\":2}");
  assert_false(at->hosts.agents[1].next.placed);
  assert_false(at->hosts.agents[1].next.settled);
  assert_int_equal(at->hosts.elastic->move.failure.status, EVEN_OK);
  host_says(at, 1, "{\"waiting\":2}");
  assert_true(at->hosts.agents[1].next.settled);
}

/* A host that is reached for those of one that is drained. */
static void ranks_that_move_are_counted_once(void **state) {
  scene *at = *state;
  add_guest(at, 0, "u");
  assert_int_equal(even_guests_ranks(&at->hosts), 1);
  at->hosts.elastic->guests[0]->came = false;
  at->hosts.elastic->move.stage = EVEN_MOVE_STARTS;
  assert_int_equal(even_guests_ranks(&at->hosts), 0);
  at->hosts.elastic->move.stage = EVEN_MOVE_ASKED;
  assert_int_equal(even_guests_ranks(&at->hosts), 1);
  even_free(at->hosts.elastic->guests[0]->link);
  at->hosts.elastic->guests[0]->link = NULL;
}

/* Somebody has bound it since the processes were told of it. */
/* z is lost, as before the next attempt everywhere, and stays out of it. */
static void where_the_lead_is_not_given_away_hosts_change_here(void **state) {
  scene *at = *state;
  bool changed = false;
  at->hosts.hands_over = true;
  at->hosts.agents[3].fallen = true;
  assert_int_equal(even_elastic_settle(&at->job, &changed), EVEN_OK);
  assert_non_null(strstr(at->told, "host here is not drained, and the job goes on here"));
  assert_true(changed);
  assert_false(at->hosts.hands_over);
  assert_int_equal(at->hosts.count, 3);
}

/* There is no checkpoint, and nobody who would get it. */
static void who_is_lost_or_leaves_needs_no_checkpoint_of_another_leader(void **state) {
  scene *at = *state;
  even_text_add(&at->job.resume, "/nonexistent/step-1");
  at->hosts.agents[2].leaves = true;
  assert_int_equal(EVEN_NEW(&at->hosts.agents[2].link), EVEN_OK);
  at->hosts.agents[2].link->fd = -1;
  assert_int_equal(even_bring_to_all(&at->job), EVEN_ERR_PEER_LOST);
  assert_int_equal(even_bring_to_those_here(&at->job), EVEN_OK);
  at->hosts.agents[2].leaves = false;
  assert_int_equal(even_bring_to_those_here(&at->job), EVEN_ERR_NOT_FOUND);
  even_text_free(&at->job.resume);
}

static void vote(scene *at, json_int_t number) {
  json_t *said = json_pack("{s:i,s:I}", "member", 3, "number", number);
  assert_non_null(said);
  even_succession_take_votes(&at->job, &at->hosts.agents[2], said);
  json_decref(said);
}

/* It may be on its way still when more is left to the host. */
static void an_answer_to_what_was_said_before_confirms_nothing(void **state) {
  scene *at = *state;
  at->hosts.agents[2].member = 3;
  at->hosts.agents[2].confirms = 7;
  vote(at, 6);
  assert_int_equal(at->hosts.agents[2].confirms, 7);
  vote(at, 7);
  assert_int_equal(at->hosts.agents[2].confirms, 0);
}

static void a_port_that_was_taken_meanwhile_is_not_the_attempts(void **state) {
  scene *at = *state;
  even_move *move = &at->hosts.elastic->move;
  struct sockaddr_in address = {.sin_family = AF_INET};
  socklen_t bytes = sizeof address;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
  assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &bytes), 0);
  move->port = ntohs(address.sin_port);
  assert_false(even_elastic_port(&at->job));
  assert_int_equal(at->job.master_port, 0);
  (void)close(fd);
  assert_int_equal(even_port_free(&move->port), EVEN_OK);
  move->attempt = 1;
  assert_false(even_elastic_port(&at->job)); /* of another attempt */
  move->attempt = 0;
  assert_int_equal(even_port_free(&move->port), EVEN_OK);
  assert_true(even_elastic_port(&at->job));
  assert_true(at->job.master_port > 0);
  assert_false(even_elastic_port(&at->job)); /* once */
}

/* The others and the job are as before, and who typed the command may type it again. */
static void what_goes_wrong_before_the_end_ends_the_draining_alone(void **state) {
  scene *at = *state;
  assert_int_equal(drain(at, 2, "{\"to\":[{\"host\":\"x\",\"ranks\":0}]}"), EVEN_OK);
  host_says(at, 1, "{\"status\":5,\"what\":\"no such device\",\"fix\":\"\"}");
  even_move_tick(&at->job);
  assert_string_equal(at->told, "host y is not drained, and the job goes on as it is: host x: no such device");
  assert_false(even_move_prepares(&at->job));
  assert_false(at->hosts.agents[2].leaves);
  assert_int_equal(drain(at, 2, "{\"stay\":true}"), EVEN_OK);
  even_move_settle(&at->job); /* the job restarts before it came so far */
  assert_non_null(strstr(at->told, "host y is not drained, and the job goes on as it is: the job restarted meanwhile"));
  assert_int_equal(drain(at, 2, "{\"stay\":true}"), EVEN_OK);
  at->job.interrupted = 2;
  even_move_tick(&at->job);
  assert_non_null(strstr(at->told, "the job is about to end"));
}

/* These hosts have no connection: who asks them gives the draining up. */
static void what_ranks_elsewhere_have_done_is_waited_for(void **state) {
  scene *at = *state;
  even_rank_progress ranks[2] = {{.joined = true}, {.joined = false}};
  at->job.count = 2;
  at->job.progress = (even_progress){.ranks = ranks, .count = 2};
  assert_int_equal(drain(at, 2, "{\"stay\":true}"), EVEN_OK);
  even_move_tick(&at->job);
  assert_true(even_move_prepares(&at->job)); /* nobody was asked yet */
  ranks[1].joined = true;
  even_move_tick(&at->job);
  assert_string_equal(at->told, "host y is not drained, and the job goes on as it is: host x is lost");
  ranks[1].joined = false;
  assert_int_equal(drain(at, 2, "{\"stay\":true,\"cold\":true}"), EVEN_OK);
  even_move_tick(&at->job); /* no process would wait there */
  assert_false(even_move_prepares(&at->job));
}

static void names_are_such_as_ssh_takes(void **state) {
  (void)state;
  static const char *const good[] = {"a", "node-7", "me@node7.cluster_2", "10.0.0.1"};
  static const char *const bad[] = {"",   "-oProxyCommand=touch", "-a", "a b", "a;b", "a$(b)", "a:1", "a,b", "a\nb",
                                    "a#1"};
  char longest[EVEN_HOSTS_NAME + 1];
  for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
    assert_true(even_hosts_is_name(good[i], strlen(good[i])));
  }
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    assert_false(even_hosts_is_name(bad[i], strlen(bad[i])));
  }
  memset(longest, 'a', EVEN_HOSTS_NAME);
  longest[EVEN_HOSTS_NAME] = '\0';
  assert_true(even_hosts_is_name(longest, EVEN_HOSTS_NAME - 1));
  assert_false(even_hosts_is_name(longest, EVEN_HOSTS_NAME));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(what_comes_while_a_host_leaves_is_kept, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(who_keeps_attempts_from_beginning_is_left_out, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(without_whom_the_job_cannot_go_on_is_not_waited_for_forever, open_scene,
                                      close_scene),
      cmocka_unit_test_setup_teardown(who_came_and_is_lost_is_not_counted_nor_started, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(a_guest_that_says_nothing_gives_its_place_back, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(who_joins_with_another_version_is_refused, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(only_who_may_be_there_again_is_waited_for, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(what_cannot_take_ranks_is_refused, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(gpus_are_not_shared_nor_exchanged_for_cores, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(what_was_prepared_holds_when_the_hosts_have_changed, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(who_names_other_devices_than_asked_is_not_believed, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(an_answer_that_comes_late_is_none_to_the_next_question, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(where_the_lead_is_not_given_away_hosts_change_here, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(who_is_lost_or_leaves_needs_no_checkpoint_of_another_leader, open_scene,
                                      close_scene),
      cmocka_unit_test_setup_teardown(an_answer_to_what_was_said_before_confirms_nothing, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(ranks_that_move_are_counted_once, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(a_port_that_was_taken_meanwhile_is_not_the_attempts, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(what_goes_wrong_before_the_end_ends_the_draining_alone, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(what_ranks_elsewhere_have_done_is_waited_for, open_scene, close_scene),
      cmocka_unit_test(names_are_such_as_ssh_takes),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
