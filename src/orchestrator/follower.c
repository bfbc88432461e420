/* evenstep agent: says what its host has, does its part of each attempt that the leader asks for. */
#include "orchestrator/follower.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/boards.h"
#include "orchestrator/bring.h"
#include "orchestrator/candidate.h"
#include "orchestrator/elastic.h"
#include "orchestrator/follower_words.h"
#include "orchestrator/hangs.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/invitation.h"
#include "orchestrator/remote_start.h"
#include "os/folder.h"
#include "os/path.h"
#include "os/pipe.h"
#include "os/socket.h"

#include <evenstep/version.h>
#include <stdio.h>
#include <string.h>

/* Hosts that wait to be let in have numbers behind the others. */
enum { TURN_MS = 100, RECORDS = 512, MOST_NUMBERS = EVEN_HOSTS_MOST + EVEN_GUESTS_MOST };

struct even_follower {
  even_link link;
  even_loop loop;
  even_candidate candidate;
  even_parcels *parcels; /* once the leader has taken this host */
  even_bring_take *brings;
  even_text brought;           /* where the last checkpoint lies that came */
  int host;                    /* its number among the job's */
  const even_join_wish *joins; /* a job that runs already; NULL: it was waited for */
  bool gone;
  bool ended;   /* the leader said so */
  bool refused; /* and why: `why` */
  bool taken;   /* the leader has begun to look at this host: it waited for it */
  bool asked;   /* an attempt shall be started */
  int recalled; /* the signal that shall end it before it was; 0: none */
  even_error why;
  even_remote_start start;
  even_device_list own;
  even_device_list world; /* placeholders but for its own */
  even_agent_params params;
  even_job job;
  bool open;             /* the job is */
  bool running;          /* an attempt of it */
  even_loop_watch watch; /* of `loop`, in the job's */
  int telemetry_fd;
  even_telemetry_reader *reader;
  even_record records[RECORDS];
};

/* ---- saying ---- */

static void tell(even_follower *follower, even_message_kind kind, even_text *text, const void *data, size_t bytes) {
  if (even_link_send_text(&follower->link, kind, text, data, bytes) != EVEN_OK) {
    even_error_clear(); /* the leader hears of the end of this host, if of nothing else */
  }
}

static void say_error(even_follower *follower, even_message_kind kind, const even_error *error) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "status", error->status);
  even_json_string(&json, "what", error->what);
  even_json_string(&json, "fix", error->fix);
  even_json_object_end(&json);
  tell(follower, kind, &text, NULL, 0);
}

static void greet(even_follower *follower) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "evenstep", even_version());
  even_json_integer(&json, "protocol", EVEN_MESSAGE_PROTOCOL);
  even_json_integer(&json, "record_bytes", (int64_t)sizeof(even_record));
  even_json_integer(&json, "host", follower->host);
  even_json_unsigned(&json, "member", follower->candidate.self);
  even_json_integer(&json, "voter_port", follower->candidate.port);
  if (follower->joins != NULL) {
    even_json_bool(&json, "joins", true);
    even_json_integer(&json, "ranks", follower->joins->ranks);
  }
  even_json_object_end(&json);
  tell(follower, EVEN_MESSAGE_GREET, &text, NULL, 0);
}

/* ---- what the job tells ---- */

void even_job_follower_send(even_job *job, even_message_kind kind, even_text *text) {
  tell(job->follower, kind, text, NULL, 0);
}

/* What the ranks wrote since the last time; while the leader cannot keep up, it stays in their rings. */
static void forward_records(even_follower *follower) {
  size_t got = follower->reader == NULL ? 0 : RECORDS;
  while (got == RECORDS && even_link_has_room(&follower->link)) {
    even_text text = EVEN_TEXT_EMPTY;
    got = even_telemetry_reader_drain(follower->reader, follower->records, RECORDS, NULL);
    even_text_add(&text, "{}");
    if (got > 0) {
      tell(follower, EVEN_MESSAGE_RECORDS, &text, follower->records, got * sizeof follower->records[0]);
    } else {
      even_text_free(&text);
    }
  }
}

void even_job_follower_tell_end(even_job *job, const even_job_rank *rank) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text tails = EVEN_TEXT_EMPTY;
  even_boards_turn(job); /* what it has said, and the steps that it has made, come before its end */
  forward_records(job->follower);
  even_oom_watch_read(&job->oom);
  even_follower_words_end(job, rank, &text, &tails);
  tell(job->follower, EVEN_MESSAGE_ENDED, &text, even_text_string(&tails), tails.length);
  even_text_free(&tails);
}

void even_job_follower_tell_stopped(even_job *job, const even_job_rank *rank, int signal) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&text, "{\"rank\":%zu,\"signal\":%d}", (size_t)(rank - job->ranks), signal);
  tell(job->follower, EVEN_MESSAGE_STOPPED, &text, NULL, 0);
}

void even_job_follower_tell_hung(even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    even_text text = EVEN_TEXT_EMPTY;
    if (!job->ranks[i].hung || !job->ranks[i].alive) {
      continue;
    }
    even_json json = even_json_begin(&text, 0);
    even_json_object(&json, NULL);
    even_json_integer(&json, "rank", (int64_t)i);
    even_json_string(&json, "words", even_hangs_words(job->hangs, i));
    even_json_object_end(&json);
    tell(job->follower, EVEN_MESSAGE_HUNG, &text, NULL, 0);
  }
}

static void on_notice(void *context, const char *words) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "text", words);
  even_json_object_end(&json);
  tell(context, EVEN_MESSAGE_NOTICE, &text, NULL, 0);
}

bool even_job_follower_drains(even_job *job, int number) {
  even_text text = EVEN_TEXT_EMPTY;
  if (job->draining != 0) {
    return number == SIGUSR1;
  }
  job->draining = number;
  even_text_format(&text, "{\"signal\":%d}", number);
  tell(job->follower, EVEN_MESSAGE_DRAIN, &text, NULL, 0);
  return true;
}

void even_job_follower_signalled(even_job *job, int number) {
  even_follower *follower = job->follower;
  char words[64];
  if (number == SIGINT && follower->joins != NULL && job->draining == 0) {
    (void)even_job_follower_drains(job, number); /* its user's own word: it would leave */
    return;
  }
  if (number == SIGINT && follower->joins == NULL) {
    return; /* of a terminal or a scheduler that tells all: the leader has it, too */
  }
  (void)snprintf(words, sizeof words, "its agent was ended by %s", even_signal_name(number));
  on_notice(follower, words);
  follower->ended = true;
  if (follower->running) {
    even_job_end_ranks(job, number, false);
  }
}

static void on_rank_started(void *context, int rank, pid_t pid) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&text, "{\"rank\":%d,\"process\":%ld}", rank, (long)pid);
  tell(context, EVEN_MESSAGE_STARTED, &text, NULL, 0);
}

/* A leader that cannot keep up gets fewer lines; the log here has all. */
static void on_line(void *context, int rank, bool error, const char *line, size_t length) {
  even_follower *follower = context;
  even_text text = EVEN_TEXT_EMPTY;
  size_t most = even_message_most_data(EVEN_MESSAGE_LINE);
  if (!follower->start.shown[rank] || !even_link_has_room(&follower->link)) {
    return;
  }
  even_text_format(&text, "{\"rank\":%d,\"error\":%s}", rank, error ? "true" : "false");
  tell(follower, EVEN_MESSAGE_LINE, &text, line, length < most ? length : most);
}

static void on_hang(void *context, int rank, bool over, const char *words) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "rank", rank);
  even_json_bool(&json, "over", over);
  even_json_string(&json, "words", words);
  even_json_object_end(&json);
  tell(context, EVEN_MESSAGE_HANG, &text, NULL, 0);
}

/* The leader is gone, or cannot be heard: nobody can say what shall become of this host's ranks. */
static void end_without_leader(even_follower *follower) {
  if (follower->running && follower->job.stage != EVEN_JOB_KILLED) {
    even_job_end_ranks(&follower->job, SIGKILL, true);
  }
}

static void on_tick(void *context) {
  even_follower *follower = context;
  forward_records(follower);
  even_link_tick(&follower->link, follower->open && follower->job.alive > 0);
  even_parcels_tick(follower->parcels);
  even_bring_take_tick(follower->brings);
  if (follower->gone || even_candidate_superseded(&follower->candidate)) {
    end_without_leader(follower);
  }
}

/* ---- what the leader says ---- */

static void say_holds(void *context, even_text *text) {
  tell(context, EVEN_MESSAGE_HOLDS, text, NULL, 0);
}

static even_link *way(void *context, int host) {
  even_follower *follower = context;
  (void)host;
  return follower->link.fd >= 0 ? &follower->link : NULL;
}

static even_status open_parcels(even_follower *follower) {
  const even_parcels_params params = {
      .size = sizeof params, .self = follower->host, .count = MOST_NUMBERS, .context = follower, .way = way};
  if (follower->parcels == NULL) {
    EVEN_TRY(even_parcels_open(&params, &follower->parcels));
  }
  return follower->brings == NULL
             ? even_bring_take_open(follower->parcels, &follower->brought, say_holds, follower, &follower->brings)
             : EVEN_OK;
}

static void close_parcels(even_follower *follower) {
  even_bring_take_close(follower->brings);
  follower->brings = NULL;
  even_parcels_close(follower->parcels);
  follower->parcels = NULL;
}

/* This host has another number from now on, which parcels name. NULL, or none: the one that it has. */
static even_status renumber(even_follower *follower, const json_t *number) {
  if (!json_is_integer(number) || (int)json_integer_value(number) == follower->host) {
    return EVEN_OK;
  }
  if (follower->running) {
    return even_fail(EVEN_ERR_INPUT, "this host gets another number while an attempt runs");
  }
  bool were_open = follower->parcels != NULL;
  close_parcels(follower);
  follower->host = (int)json_integer_value(number);
  even_status status = were_open ? open_parcels(follower) : EVEN_OK;
  follower->job.parcels = follower->parcels; /* of a job that is open still; the start opens it anew */
  return status;
}

static even_status check(even_follower *follower, const json_t *content) {
  even_text facts = EVEN_TEXT_EMPTY;
  follower->taken = true;
  const char *folder = json_string_value(json_object_get(content, "folder"));
  const char *script = json_string_value(json_object_get(content, "script"));
  json_int_t ranks = json_integer_value(json_object_get(content, "ranks"));
  if (folder == NULL || folder[0] != '/' || ranks < 0 || ranks > EVEN_TELEMETRY_MOST_RANKS) {
    return even_fail(EVEN_ERR_INPUT, "the leader asks for nothing that can be checked");
  }
  EVEN_TRY(renumber(follower, json_object_get(content, "host")));
  EVEN_TRY(open_parcels(follower));
  even_device_list_free(&follower->own);
  even_status chosen = even_device_select(NULL, (int)ranks, &follower->own);
  const char *trouble = chosen == EVEN_OK ? NULL : even_error_last()->what;
  if (trouble != NULL) {
    even_json json = even_json_begin(&facts, 0);
    even_json_object(&json, NULL);
    even_json_string(&json, "device_trouble", trouble);
    even_json_object_end(&json);
    tell(follower, EVEN_MESSAGE_FACTS, &facts, NULL, 0);
    return EVEN_OK;
  }
  const even_host_needs needs = {
      .folder = folder,
      .script = script,
      .python = json_string_value(json_object_get(content, "python")),
  };
  if (even_path_enter(folder) != EVEN_OK) {
    even_error_clear(); /* the facts say that it is not there */
  }
  even_status status = even_host_facts_read(&needs, &follower->own, &facts);
  if (status != EVEN_OK) {
    even_text_free(&facts);
    return status;
  }
  tell(follower, EVEN_MESSAGE_FACTS, &facts, NULL, 0);
  return EVEN_OK;
}

static void tell_joined(const even_follower *follower) {
  const even_remote_start *start = &follower->start;
  char words[160];
  if (follower->joins == NULL || follower->open) {
    return;
  }
  if (start->count == 1) {
    (void)snprintf(words, sizeof words, "this host takes part: rank %d of %d", start->first, start->world);
  } else {
    (void)snprintf(words, sizeof words, "this host takes part: ranks %d %s %d of %d", start->first,
                   start->count == 2 ? "and" : "to", start->first + start->count - 1, start->world);
  }
  follower->joins->taken(follower->joins->context, words);
}

static even_status take_start(even_follower *follower, const even_message *message) {
  if (follower->asked || follower->running) {
    return even_fail(EVEN_ERR_INPUT, "an attempt shall be started while another one runs");
  }
  even_remote_start_free(&follower->start);
  EVEN_TRY(even_remote_start_read(message->json, message->json_bytes, &follower->start));
  if ((size_t)follower->start.count != follower->own.count) {
    return even_fail(EVEN_ERR_INPUT, "an attempt of %d ranks, where %zu devices were offered", follower->start.count,
                     follower->own.count);
  }
  tell_joined(follower);
  even_candidate_settle(&follower->candidate);
  follower->asked = true;
  follower->recalled = 0;
  return EVEN_OK;
}

static even_status take_signal(even_follower *follower, const json_t *content) {
  json_int_t number = json_integer_value(json_object_get(content, "number"));
  bool groups = json_is_true(json_object_get(content, "groups"));
  if (number < 1 || number >= NSIG) {
    return even_fail(EVEN_ERR_INPUT, "a signal of number %lld", (long long)number);
  }
  bool ends = json_is_true(json_object_get(content, "ends"));
  if (follower->asked && ends) {
    follower->recalled = (int)number; /* it came with the start: none is started then */
    return EVEN_OK;
  }
  if (!follower->running) {
    return EVEN_OK; /* they have ended meanwhile */
  }
  if (ends) {
    even_job_end_ranks(&follower->job, (int)number, groups);
  } else {
    even_job_signal_ranks(&follower->job, (int)number, groups);
  }
  return EVEN_OK;
}

/* Of an attempt that has ended here meanwhile: nothing. */
static even_status take_generation(even_follower *follower, const json_t *content) {
  return follower->running ? even_boards_follow(&follower->job, content) : EVEN_OK;
}

static even_status take_fill(even_follower *follower, const json_t *content) {
  const json_t *rank = json_object_get(content, "rank");
  if (!json_is_integer(rank) || json_integer_value(rank) < 0) {
    return even_fail(EVEN_ERR_INPUT, "a process shall take a place that is none");
  }
  return follower->running ? even_job_replace_fill(&follower->job, (size_t)json_integer_value(rank)) : EVEN_OK;
}

/* The first that a host hears of an attempt, where that goes on from one. */
static even_status take_checkpoint(even_follower *follower, const json_t *content) {
  EVEN_TRY(renumber(follower, json_object_get(content, "host")));
  return follower->brings == NULL ? EVEN_OK : even_bring_take_hear(follower->brings, content);
}

static void take_refusal(even_follower *follower, const json_t *content) {
  const char *what = json_string_value(json_object_get(content, "what"));
  const char *fix = json_string_value(json_object_get(content, "fix"));
  (void)even_fail(EVEN_ERR_UNSUPPORTED, "the leader refuses: %.560s", what == NULL ? "it does not say why" : what);
  (void)even_error_fix("%s", fix == NULL ? "" : fix);
  follower->why = *even_error_last();
  follower->refused = true;
}

static even_status on_message(void *context, even_link *link, const even_message *message) {
  even_follower *follower = context;
  json_t *content = NULL;
  (void)link;
  if (even_candidate_superseded(&follower->candidate)) {
    return even_fail(EVEN_ERR_PEER_LOST, "another host leads this job by now");
  }
  if (message->kind == EVEN_MESSAGE_MEMBERS || message->kind == EVEN_MESSAGE_ESTATE) {
    return even_candidate_take(&follower->candidate, link, message);
  }
  if (even_parcels_know(message->kind)) {
    return even_parcels_take(follower->parcels, 0, message);
  }
  if (message->kind == EVEN_MESSAGE_START) {
    return take_start(follower, message);
  }
  if (message->kind == EVEN_MESSAGE_END) {
    follower->ended = true;
    return EVEN_OK;
  }
  EVEN_TRY(even_json_parse("what the leader says", message->json, message->json_bytes, &content));
  even_status status = EVEN_OK;
  switch (message->kind) {
    case EVEN_MESSAGE_CHECK:
      status = check(follower, content);
      break;
    case EVEN_MESSAGE_CHECKPOINT:
      status = take_checkpoint(follower, content);
      break;
    case EVEN_MESSAGE_SIGNAL:
      status = take_signal(follower, content);
      break;
    case EVEN_MESSAGE_REFUSE:
      take_refusal(follower, content);
      break;
    case EVEN_MESSAGE_GENERATION:
      status = take_generation(follower, content);
      break;
    case EVEN_MESSAGE_FILL:
      status = take_fill(follower, content);
      break;
    default:
      status = even_fail(EVEN_ERR_INPUT, "a message of kind %d, which leaders do not send", (int)message->kind);
      break;
  }
  json_decref(content);
  return status;
}

static void on_ready(void *context, even_link *link) {
  (void)link;
  greet(context);
}

static void on_ended(void *context, even_link *link) {
  even_follower *follower = context;
  follower->gone = true;
  even_parcels_lost(follower->parcels, 0);
  if (!follower->refused) {
    follower->why = *even_link_why(link);
  }
}

/* ---- its part of an attempt ---- */

static even_status make_world(even_follower *follower) {
  const even_remote_start *start = &follower->start;
  if (follower->world.items == NULL) {
    EVEN_TRY(EVEN_NEW_ARRAY(&follower->world.items, (size_t)start->world));
    follower->world.count = (size_t)start->world;
  }
  for (size_t i = 0; i < follower->world.count; i++) {
    even_device *device = &follower->world.items[i];
    bool own = i >= (size_t)start->first && i < (size_t)start->first + (size_t)start->count;
    *device = own ? follower->own.items[i - (size_t)start->first]
                  : (even_device){.name = "elsewhere", .numa_node = -1, .cuda_index = -1, .efficiency = -1};
  }
  return EVEN_OK;
}

static even_status open_telemetry(even_follower *follower) {
  if (!follower->start.telemetry) {
    return EVEN_OK;
  }
  EVEN_TRY(even_telemetry_create_segment(follower->start.world, 0, &follower->telemetry_fd));
  EVEN_TRY(even_telemetry_reader_open(follower->telemetry_fd, &follower->reader));
  even_telemetry_reader_want_calls(follower->reader, follower->start.calls);
  return EVEN_OK;
}

static void loop_ready(void *context, int fd) {
  even_follower *follower = context;
  (void)fd;
  if (even_loop_turn(&follower->loop, 0) != EVEN_OK) {
    even_error_clear(); /* it says so again when it is turned by itself */
  }
}

static even_status open_job(even_follower *follower) {
  const even_remote_start *start = &follower->start;
  EVEN_TRY(make_world(follower));
  EVEN_TRY(open_telemetry(follower));
  follower->params = (even_agent_params){.size = sizeof follower->params,
                                         .devices = &follower->world,
                                         .command = start->command,
                                         .run_folder = start->run_folder,
                                         .environment = start->environment,
                                         .cpu_quota = start->quota,
                                         .telemetry_fd = follower->telemetry_fd,
                                         .hang_seconds = start->hang_seconds,
                                         .restart_hung = start->restart_hung,
                                         .notice_seconds = start->notice_seconds,
                                         .unpinned = start->unpinned,
                                         .max_restarts = start->max_restarts,
                                         .shrink = start->shrink,
                                         .replace = start->replace,
                                         .observer = {.context = follower,
                                                      .rank_started = on_rank_started,
                                                      .line = on_line,
                                                      .tick = on_tick,
                                                      .hang = on_hang,
                                                      .notice = on_notice}};
  follower->job = (even_job){.params = &follower->params,
                             .count = follower->world.count,
                             .first = (size_t)start->first,
                             .local = (size_t)start->count,
                             .group = start->group,
                             .groups = start->groups,
                             .era = start->era,
                             .follower = follower,
                             .parcels = follower->parcels,
                             .loop = {.fd = -1},
                             .signals = {.fd = -1},
                             .guardian = {.pid = -1, .pipe = -1},
                             .generation_fd = -1,
                             .oom = {.kernel_log = -1}};
  memcpy(follower->job.id, start->job, sizeof follower->job.id);
  char address[64];
  even_socket_local(follower->link.fd, address, sizeof address);
  even_socket_interface(address, follower->job.interface, sizeof follower->job.interface);
  follower->open = true;
  EVEN_TRY(even_job_open(&follower->job));
  return even_loop_add(&follower->job.loop, &follower->watch, follower->loop.fd, loop_ready, follower);
}

static void close_job(even_follower *follower) {
  if (follower->open) {
    even_job_close(&follower->job);
  }
  follower->open = false;
  even_telemetry_reader_close(follower->reader);
  follower->reader = NULL;
  even_pipe_close(follower->telemetry_fd);
  follower->telemetry_fd = -1;
  even_free(follower->world.items);
  follower->world = (even_device_list){NULL, 0};
}

/* Hosts have come, or gone: all that is counted by ranks is made anew. */
static bool is_same_world(const even_job *job, const even_remote_start *start) {
  return job->count == (size_t)start->world && job->first == (size_t)start->first &&
         job->local == (size_t)start->count && job->group == start->group && job->groups == start->groups &&
         job->era == start->era;
}

/* What is new with each attempt. */
static even_status prepare_job(even_follower *follower) {
  const even_remote_start *start = &follower->start;
  even_job *job = &follower->job;
  if (follower->host != start->group || (follower->open && !is_same_world(job, start))) {
    close_job(follower);
    close_parcels(follower);
    follower->host = start->group;
    EVEN_TRY(open_parcels(follower));
  }
  if (!follower->open) {
    EVEN_TRY(open_job(follower));
  }
  follower->params.command = start->command;
  follower->params.run_folder = start->run_folder;
  follower->params.environment = start->environment;
  follower->params.cpu_quota = start->quota;
  job->attempt = start->attempt;
  job->master_port = start->master_port;
  memcpy(job->master_address, start->master_address, sizeof job->master_address);
  even_text_clear(&job->resume);
  if (start->resume != NULL) {
    even_text_add(&job->resume, start->resume);
    if (!even_path_is_folder(start->resume)) {
      (void)even_fail(EVEN_ERR_NOT_FOUND, "checkpoint %s is not there", start->resume);
      return even_error_fix("keep checkpoints where nobody removes them while a job restarts");
    }
  }
  return even_text_status(&job->resume);
}

static void say_settled(even_follower *follower) {
  even_text text = EVEN_TEXT_EMPTY;
  even_follower_words_settled(&follower->job, &text);
  tell(follower, EVEN_MESSAGE_SETTLED, &text, NULL, 0);
}

/* As if they had been started, and ended by that signal. */
static void settle_recalled(even_follower *follower) {
  const even_remote_start *start = &follower->start;
  even_text settled = EVEN_TEXT_EMPTY;
  for (int rank = start->first; rank < start->first + start->count; rank++) {
    even_text text = EVEN_TEXT_EMPTY;
    even_follower_words_recalled(rank, follower->recalled, &text);
    tell(follower, EVEN_MESSAGE_ENDED, &text, NULL, 0);
  }
  even_text_add(&settled, "{\"out_of_memory\":[]}");
  tell(follower, EVEN_MESSAGE_SETTLED, &settled, NULL, 0);
}

static void run_attempt(even_follower *follower) {
  follower->asked = false;
  if (follower->recalled != 0) {
    settle_recalled(follower);
    return;
  }
  even_status status = prepare_job(follower);
  if (status == EVEN_OK) {
    follower->running = true;
    status = even_job_run_attempt(&follower->job);
    follower->running = false;
  }
  forward_records(follower);
  if (status == EVEN_OK) {
    say_settled(follower);
  } else {
    say_error(follower, EVEN_MESSAGE_FAILED, even_error_last());
  }
}

/* ---- its life ---- */

static even_status turn(even_follower *follower) {
  if (follower->open && follower->job.loop.fd >= 0) {
    EVEN_TRY(even_loop_turn(&follower->job.loop, TURN_MS));
  } else {
    EVEN_TRY(even_loop_turn(&follower->loop, TURN_MS));
    follower->ended = follower->ended || even_signals_end_pending() != 0;
  }
  even_link_tick(&follower->link, false);
  even_parcels_tick(follower->parcels);
  even_bring_take_tick(follower->brings);
  return EVEN_OK;
}

/* The leader is gone, or is none any more: nothing of its attempt is left here. */
static even_status find_next(even_follower *follower, const even_link_calls *calls, even_candidate_turn *turn) {
  even_link_close(&follower->link);
  close_job(follower);
  close_parcels(follower);
  EVEN_TRY(even_candidate_await(&follower->candidate, &follower->loop, calls, &follower->link, turn));
  follower->gone = *turn != EVEN_CANDIDATE_SERVE;
  return EVEN_OK;
}

static even_status serve_leaders(even_follower *follower, const even_link_calls *calls, bool *leads) {
  while (!follower->ended && !follower->refused) {
    even_candidate_turn next = EVEN_CANDIDATE_SERVE;
    EVEN_TRY(turn(follower));
    if (follower->asked) {
      run_attempt(follower);
    }
    if (!follower->ended && (follower->gone || even_candidate_superseded(&follower->candidate))) {
      EVEN_TRY(find_next(follower, calls, &next));
    }
    *leads = next == EVEN_CANDIDATE_LEAD;
    if (next != EVEN_CANDIDATE_SERVE) {
      break;
    }
  }
  return EVEN_OK;
}

static even_status serve(even_follower *follower, const char *line, bool *met, even_estate **estate) {
  bool leads = false;
  const even_link_calls calls = {.context = follower, .ready = on_ready, .message = on_message, .ended = on_ended};
  EVEN_TRY(even_loop_open(&follower->loop));
  EVEN_TRY(even_invitation_accept(line, &follower->loop, &calls, &follower->link, &follower->host));
  follower->gone = false; /* connections that came to nothing were */
  even_status status = serve_leaders(follower, &calls, &leads);
  *met = follower->taken;
  EVEN_TRY(status);
  if (leads) {
    return even_candidate_inherit(&follower->candidate, estate);
  }
  return follower->ended ? EVEN_OK : even_error_restore(&follower->why);
}

even_status even_hosts_serve(const char *invitation, const even_join_wish *joins, bool *met, even_estate **estate,
                             int *exit_code) {
  even_follower *follower = NULL;
  struct sigaction pipe_before;
  *met = false;
  EVEN_TRY(EVEN_NEW(&follower));
  even_status ignored = even_signals_pipe_ignore(&pipe_before);
  if (ignored != EVEN_OK) {
    even_free(follower);
    return ignored;
  }
  follower->joins = joins;
  follower->link.fd = -1;
  follower->loop.fd = -1;
  follower->telemetry_fd = -1;
  follower->candidate.listener = -1;
  if (estate != NULL) {
    *estate = NULL;
    even_candidate_open(&follower->candidate, invitation);
  }
  even_status status = serve(follower, invitation, met, estate);
  const even_error kept = *even_error_last();
  even_link_close(&follower->link);
  close_job(follower);
  close_parcels(follower);
  even_text_free(&follower->brought);
  even_candidate_close(&follower->candidate);
  even_loop_close(&follower->loop);
  even_remote_start_free(&follower->start);
  even_device_list_free(&follower->own);
  even_signals_pipe_restore(&pipe_before);
  even_free(follower);
  *exit_code = status == EVEN_OK ? 0 : even_status_exit_code(status);
  (void)even_error_restore(&kept);
  return status;
}
