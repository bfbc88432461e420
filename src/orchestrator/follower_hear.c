/* What an agent hears from the leader that it serves. */
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/aside_hosts.h"
#include "orchestrator/boards.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/openings.h"
#include "orchestrator/remote.h"
#include "orchestrator/standing.h"
#include "orchestrator/waiting.h"
#include "os/clock.h"
#include "os/path.h"
#include "os/socket.h"

#include <stdio.h>

static void say_holds(void *context, even_text *text) {
  even_follower_tell(context, EVEN_MESSAGE_HOLDS, text, NULL, 0);
}

static void say_found(void *context, even_text *text) {
  even_follower_tell(context, EVEN_MESSAGE_FOUND, text, NULL, 0);
}

static even_link *way(void *context, int host) {
  even_follower *follower = context;
  (void)host;
  return follower->link.fd >= 0 ? &follower->link : NULL;
}

even_status even_follower_open_parcels(even_follower *follower) {
  const even_parcels_params params = {.size = sizeof params,
                                      .self = follower->host,
                                      .count = EVEN_FOLLOWER_MOST_NUMBERS,
                                      .context = follower,
                                      .way = way};
  if (follower->parcels == NULL) {
    EVEN_TRY(even_parcels_open(&params, &follower->parcels));
  }
  if (follower->brings == NULL) {
    EVEN_TRY(even_bring_take_open(follower->parcels, 0, &follower->kept, say_holds, follower, &follower->brings));
  }
  return follower->gives == NULL
             ? even_bring_give_open(follower->parcels, &follower->kept, say_found, follower, &follower->gives)
             : EVEN_OK;
}

void even_follower_close_parcels(even_follower *follower) {
  even_bring_give_close(follower->gives); /* parcels go on in it, to whom takes them */
  even_bring_take_close(follower->brings);
  follower->brings = NULL;
  follower->gives = NULL;
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
  even_follower_close_parcels(follower);
  follower->host = (int)json_integer_value(number);
  even_status status = were_open ? even_follower_open_parcels(follower) : EVEN_OK;
  follower->job.parcels = follower->parcels; /* of a job that is open still; the start opens it anew */
  return status;
}

/* For as long as the leader bears silence, this one does, too; who would join hears of it from any host. */
static even_status watch_leader(even_follower *follower, const json_t *silence_ms) {
  json_int_t wish = json_integer_value(silence_ms);
  if (!json_is_integer(silence_ms) || wish < 0 || wish > EVEN_SOCKET_LONGEST_SILENCE_MS) {
    return even_fail(EVEN_ERR_INPUT, "a host's silence of %lld ms", (long long)wish);
  }
  even_socket_silence_set((int)wish);
  return follower->link.fd < 0 ? EVEN_OK : even_socket_watch(follower->link.fd);
}

static void note_taken(even_follower *follower) {
  follower->taken = true;
  if (follower->met != NULL) {
    *follower->met = true;
  }
}

/* How fast its devices are by a profile of its own, if it has one; a bad one ends nothing, and the leader tells it. */
static void read_profile(even_follower *follower, const char *path, char *trouble, size_t bytes) {
  if (path != NULL && even_path_exists(path) && even_profile_strengths(path, &follower->own) != EVEN_OK) {
    (void)snprintf(trouble, bytes, "%.250s; fix: %.130s", even_error_last()->what, even_error_last()->fix);
    even_error_clear();
  }
}

even_status even_follower_check(even_follower *follower, const json_t *content) {
  even_text facts = EVEN_TEXT_EMPTY;
  char profile_trouble[400] = "";
  note_taken(follower);
  const char *folder = json_string_value(json_object_get(content, "folder"));
  const char *script = json_string_value(json_object_get(content, "script"));
  json_int_t ranks = json_integer_value(json_object_get(content, "ranks"));
  if (folder == NULL || folder[0] != '/' || ranks < 0 || ranks > EVEN_TELEMETRY_MOST_RANKS) {
    return even_fail(EVEN_ERR_INPUT, "the leader asks for nothing that can be checked");
  }
  even_text_clear(&follower->folder);
  even_text_add(&follower->folder, folder);
  EVEN_TRY(even_text_status(&follower->folder));
  follower->wish = (int)ranks;
  EVEN_TRY(renumber(follower, json_object_get(content, "host")));
  EVEN_TRY(watch_leader(follower, json_object_get(content, "silence_ms")));
  EVEN_TRY(even_follower_open_parcels(follower));
  even_device_list_free(&follower->own);
  even_device_list_free(&follower->whole);
  even_status chosen = even_device_select(NULL, (int)ranks, &follower->own);
  const char *trouble = chosen == EVEN_OK ? NULL : even_error_last()->what;
  if (trouble != NULL) {
    even_json json = even_json_begin(&facts, 0);
    even_json_object(&json, NULL);
    even_json_string(&json, "device_trouble", trouble);
    even_json_object_end(&json);
    even_follower_tell(follower, EVEN_MESSAGE_FACTS, &facts, NULL, 0);
    return EVEN_OK;
  }
  if (even_path_enter(folder) != EVEN_OK) {
    even_error_clear(); /* the facts say that it is not there */
  } else {
    read_profile(follower, json_string_value(json_object_get(content, "profile")), profile_trouble,
                 sizeof profile_trouble);
  }
  const even_host_needs needs = {
      .folder = folder,
      .script = script,
      .python = json_string_value(json_object_get(content, "python")),
      .data = json_object_get(content, "data"),
      .profile_trouble = profile_trouble,
  };
  even_status status = even_host_facts_read(&needs, &follower->own, &facts);
  if (status != EVEN_OK) {
    even_text_free(&facts);
    return status;
  }
  even_text_clear(&follower->facts); /* for a leader that finds its attempt running */
  even_text_add(&follower->facts, even_text_string(&facts));
  even_follower_tell(follower, EVEN_MESSAGE_FACTS, &facts, NULL, 0);
  return EVEN_OK;
}

static void tell_joined(const even_follower *follower) {
  const even_remote_start *start = &follower->start;
  char words[160];
  if (follower->joins == NULL || follower->open) {
    return;
  }
  int length =
      snprintf(words, sizeof words, "this host takes part: rank%s %d", start->count == 1 ? "" : "s", start->first);
  if (start->count > 1) {
    length += snprintf(words + length, sizeof words - (size_t)length, " %s %d", start->count == 2 ? "and" : "to",
                       start->first + start->count - 1);
  }
  if (start->late) {
    (void)snprintf(words + length, sizeof words - (size_t)length, ", while the others train");
  } else {
    (void)snprintf(words + length, sizeof words - (size_t)length, " of %d", start->world - start->all_spares);
  }
  follower->joins->taken(follower->joins->context, words);
}

/* Which of its devices take part, by the leader's word. */
even_status even_follower_use_devices(even_follower *follower) {
  const even_remote_start *start = &follower->start;
  const even_device_list *whole = follower->whole.count > 0 ? &follower->whole : &follower->own;
  even_device_list used;
  if (start->used == NULL) {
    return EVEN_OK;
  }
  if (start->used[start->count - 1] >= whole->count) {
    return even_fail(EVEN_ERR_INPUT, "an attempt on device %zu of %zu", start->used[start->count - 1], whole->count);
  }
  EVEN_TRY(even_aside_copy(whole, start->used, (size_t)start->count, &used));
  if (follower->whole.count == 0) {
    follower->whole = follower->own;
  } else {
    even_device_list_free(&follower->own);
  }
  follower->own = used;
  return EVEN_OK;
}

_Atomic uint64_t *even_follower_signals(even_follower *follower) {
  return follower->legacy == NULL ? &follower->signals : &follower->legacy->page->signals;
}

static even_status take_start(even_follower *follower, const even_message *message) {
  if (follower->asked || follower->running) {
    return even_fail(EVEN_ERR_INPUT, "an attempt shall be started while another one runs");
  }
  even_remote_start_free(&follower->start);
  EVEN_TRY(even_remote_start_read(message->json, message->json_bytes, &follower->start));
  even_text_free(&follower->untold); /* of an attempt that nobody has gone on with */
  even_text_clear(&follower->started);
  even_text_append(&follower->started, message->json, message->json_bytes);
  EVEN_TRY(even_text_status(&follower->started));
  even_warm_part_begins(&follower->next, (size_t)follower->start.count, &follower->own);
  EVEN_TRY(even_follower_use_devices(follower));
  if ((size_t)follower->start.count != follower->own.count) {
    return even_fail(EVEN_ERR_INPUT, "an attempt of %d ranks, where %zu devices were offered", follower->start.count,
                     follower->own.count);
  }
  tell_joined(follower);
  even_candidate_settle(&follower->candidate);
  follower->asked = true;
  follower->settled = false;
  follower->recalled = 0;
  atomic_store(even_follower_signals(follower), 0);
  return EVEN_OK;
}

/* One that holds the others up. */
static even_status end_rank(even_follower *follower, const json_t *rank, bool standing) {
  json_int_t number = json_integer_value(rank);
  const even_job *job = &follower->job;
  if (!follower->running) {
    return EVEN_OK; /* it has ended meanwhile */
  }
  if (number < 0 || number >= (json_int_t)job->count || !even_job_is_here(job, (size_t)number)) {
    return even_fail(EVEN_ERR_INPUT, "a rank shall be ended that is not on this host");
  }
  even_job_end_alone(&follower->job, (size_t)number, standing);
  return EVEN_OK;
}

/* One that is forwarded, which the leader says again where it does not know that it was passed on. Noted first: it does
 * not come twice, whenever this agent is killed. */
static void pass_on(even_follower *follower, int number, const json_t *serial) {
  _Atomic uint64_t *passed = even_follower_signals(follower);
  uint64_t its = (uint64_t)json_integer_value(serial);
  if (its > atomic_load(passed)) {
    atomic_store(passed, its);
    even_job_signal_ranks(&follower->job, number, false);
  }
}

static even_status take_signal(even_follower *follower, const json_t *content) {
  json_int_t number = json_integer_value(json_object_get(content, "number"));
  bool groups = json_is_true(json_object_get(content, "groups"));
  if (number < 1 || number >= NSIG) {
    return even_fail(EVEN_ERR_INPUT, "a signal of number %lld", (long long)number);
  }
  bool ends = json_is_true(json_object_get(content, "ends"));
  const json_t *rank = json_object_get(content, "rank");
  if (rank != NULL) {
    return end_rank(follower, rank, json_is_true(json_object_get(content, "standing")));
  }
  if (follower->asked && ends) {
    follower->recalled = (int)number; /* it came with the start: none is started then */
    return EVEN_OK;
  }
  if (!follower->running) { /* they have ended meanwhile, and their checkpoints may be written yet */
    if (ends && number == SIGINT) {
      even_job_snapshots_give_up(&follower->job);
    }
    return EVEN_OK;
  }
  if (ends) {
    even_job_end_ranks(&follower->job, (int)number, groups);
  } else {
    pass_on(follower, (int)number, json_object_get(content, "serial"));
  }
  return EVEN_OK;
}

/* Of an attempt that has ended here meanwhile: nothing. */
static even_status take_generation(even_follower *follower, const json_t *content) {
  return follower->running ? even_boards_follow(&follower->job, content) : EVEN_OK;
}

static even_status take_standing(even_follower *follower, const json_t *content) {
  return follower->running ? even_job_standing_take(&follower->job, NULL, content) : EVEN_OK;
}

static even_status take_opening(even_follower *follower, const json_t *content) {
  return follower->running ? even_job_openings_take(&follower->job, content, even_clock_ns()) : EVEN_OK;
}

static even_status take_waiting(even_follower *follower, const json_t *content) {
  return follower->running ? even_job_waiting_take(&follower->job, NULL, content, even_clock_ns()) : EVEN_OK;
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

static even_status take_seek(even_follower *follower, const json_t *content) {
  return follower->gives == NULL ? EVEN_OK : even_bring_give_hear(follower->gives, content);
}

void even_follower_interface(const even_follower *follower, char out[EVEN_JOB_INTERFACE]) {
  char address[64];
  even_socket_local(follower->link.fd, address, sizeof address);
  even_socket_interface(address, out, EVEN_JOB_INTERFACE);
}

static even_status take_places(even_follower *follower, const json_t *content) {
  even_text answer = EVEN_TEXT_EMPTY;
  char interface[EVEN_JOB_INTERFACE];
  even_follower_interface(follower, interface);
  uint64_t descriptors = follower->open ? follower->job.descriptors_before : 0;
  even_status status = even_warm_part_hear(&follower->next, &follower->loop, interface, descriptors,
                                           even_follower_kept_legacy(follower), content, &answer);
  if (status != EVEN_OK || answer.length == 0) {
    even_text_free(&answer);
    return status;
  }
  even_follower_tell(follower, EVEN_MESSAGE_PLACED, &answer, NULL, 0);
  return EVEN_OK;
}

void even_follower_say_places(even_follower *follower) {
  even_text answer = EVEN_TEXT_EMPTY;
  if (even_warm_part_says(&follower->next, &answer)) {
    even_follower_tell(follower, EVEN_MESSAGE_PLACED, &answer, NULL, 0);
  }
}

/* Who is asked by one that would join: where the leader is, as far as is known there. */
static even_status take_leader(even_follower *follower, json_t *content) {
  if (follower->joins == NULL || follower->taken) {
    return EVEN_OK;
  }
  EVEN_TRY(watch_leader(follower, json_object_get(content, "silence_ms")));
  json_decref(follower->pointed);
  follower->pointed = json_incref(content);
  return EVEN_OK;
}

static void take_refusal(even_follower *follower, const json_t *content) {
  const char *what = json_string_value(json_object_get(content, "what"));
  const char *fix = json_string_value(json_object_get(content, "fix"));
  (void)even_fail(EVEN_ERR_UNSUPPORTED, "the leader refuses: %.560s", what == NULL ? "it does not say why" : what);
  (void)even_error_fix("%s", fix == NULL ? "" : fix);
  follower->why = *even_error_last();
  follower->refused = true;
}

even_status even_follower_hear(void *context, even_link *link, const even_message *message) {
  even_follower *follower = context;
  json_t *content = NULL;
  (void)link;
  if (follower->joins != NULL && !follower->taken && message->kind == EVEN_MESSAGE_MEMBER) {
    return EVEN_OK; /* a host that does not lead: it answers the greeting, too */
  }
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
      if (follower->held) {
        even_follower_yield(follower, content);
      } else {
        status = even_follower_check(follower, content);
      }
      break;
    case EVEN_MESSAGE_LEADER:
      status = take_leader(follower, content);
      break;
    case EVEN_MESSAGE_ADOPT:
      status = even_follower_adopted(follower, content);
      break;
    case EVEN_MESSAGE_CHECKPOINT:
      status = take_checkpoint(follower, content);
      break;
    case EVEN_MESSAGE_SEEK:
      status = take_seek(follower, content);
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
    case EVEN_MESSAGE_STANDING:
      status = take_standing(follower, content);
      break;
    case EVEN_MESSAGE_OPENING:
      status = take_opening(follower, content);
      break;
    case EVEN_MESSAGE_WAITING:
      status = take_waiting(follower, content);
      break;
    case EVEN_MESSAGE_FILL:
      status = take_fill(follower, content);
      break;
    case EVEN_MESSAGE_PLACES:
      status = take_places(follower, content);
      break;
    default:
      status = even_fail(EVEN_ERR_INPUT, "a message of kind %d, which leaders do not send", (int)message->kind);
      break;
  }
  json_decref(content);
  return status;
}
