/* The newest checkpoint that another host has comes back to its leader. */
#include "orchestrator/bring_back.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/stop.h"
#include "orchestrator/bring.h"
#include "orchestrator/bring_give.h"
#include "orchestrator/copies.h"
#include "orchestrator/host_memory.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/path.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TICK_MS = 50, WORDS = 320 };

/* For an answer, and between two files of one that comes. */
static const uint64_t PATIENCE_NS = 60000000000u;
/* For a host that has all files of one, and is to compare and to sync them: a disk may take its time for that. */
static const uint64_t WRITING_NS = 300000000000u;

/* One that a host has. */
typedef struct found {
  size_t host;
  char *folder; /* there */
  char *order;
  uint64_t sum;
  bool memory; /* in its memory */
  char mark[EVEN_FILE_MARK];
  bool damaged; /* it came, and was */
} found;

/* LACKS: what this agent, or one before it, has sent there is not there any more. */
typedef enum answer { NOT_ASKED, ASKED, ANSWERED, LACKS, CANNOT } answer;

struct even_bring_back {
  even_job *job;
  const even_bring_back_wish *wish;
  uint64_t serial; /* of what is asked for */
  answer *answers; /* a host each */
  found *items;
  size_t count;
  size_t from;     /* the host that sends one; 0: none does */
  size_t stuck;    /* a host to which one was on its way that did not come to its end; 0: none */
  even_text copy;  /* where what this agent has sent lies, on a host's disk; empty: it knows of none */
  bool whole;      /* it is here, */
  even_text place; /* at this place; or: */
  bool failed;
  even_error why;
};

/* ---- hearing ---- */

static even_status take_one(even_bring_back *back, const even_host_agent *agent, const json_t *one) {
  const char *folder = even_json_text(one, "folder");
  const char *order = even_json_text(one, "order");
  found new = {.host = agent->index, .memory = json_is_true(json_object_get(one, "memory"))};
  if (folder[0] != '/' || order[0] == '\0' || !even_bring_sum_read(even_json_text(one, "sum"), &new.sum)) {
    return even_fail(EVEN_ERR_INPUT, "a checkpoint of host %s without its place, order or sum", agent->name);
  }
  if (strcmp(order, back->wish->after) <= 0) {
    return EVEN_OK;
  }
  (void)snprintf(new.mark, sizeof new.mark, "%s", even_json_text(one, "mark"));
  EVEN_TRY(even_realloc((void **)&back->items, back->count + 1, sizeof *back->items));
  even_status status = even_duplicate(folder, &new.folder);
  if (status == EVEN_OK) {
    status = even_duplicate(order, &new.order);
  }
  if (status != EVEN_OK) {
    even_free(new.folder);
    return status;
  }
  back->items[back->count++] = new;
  return EVEN_OK;
}

static even_status take_found(even_bring_back *back, const even_host_agent *agent, const json_t *list) {
  size_t at = 0;
  json_t *one = NULL;
  if (json_array_size(list) > EVEN_BRING_BACK_MOST) {
    return even_fail(EVEN_ERR_INPUT, "%zu checkpoints of host %s at once", json_array_size(list), agent->name);
  }
  json_array_foreach(list, at, one) {
    EVEN_TRY(take_one(back, agent, one));
  }
  return EVEN_OK;
}

/* The last error is why. */
static void fail(even_bring_back *back) {
  back->failed = true;
  back->why = *even_error_last();
  even_error_clear();
}

static void fail_as_said(even_bring_back *back, const json_t *content) {
  json_int_t status = json_integer_value(json_object_get(content, "status"));
  (void)even_fail(status > EVEN_OK && status <= EVEN_ERR_INTERRUPTED ? (even_status)status : EVEN_ERR_SYSTEM, "%.560s",
                  even_json_text(content, "what"));
  (void)even_error_fix("%s", even_json_text(content, "fix"));
  fail(back);
}

even_status even_bring_back_hear(even_host_agent *agent, const json_t *content) {
  even_bring_back *back = agent->hosts->back;
  const json_t *list = json_object_get(content, "found");
  if (back == NULL || (uint64_t)json_integer_value(json_object_get(content, "serial")) != back->serial) {
    return EVEN_OK; /* of one that is not asked for any more */
  }
  if (back->from == agent->index && json_object_get(content, "status") != NULL) {
    fail_as_said(back, content);
  } else if (back->from == 0 && back->answers[agent->index] == ASKED) {
    EVEN_TRY(take_found(back, agent, list));
    back->answers[agent->index] = !json_is_array(list)                              ? CANNOT
                                  : json_is_false(json_object_get(content, "left")) ? LACKS
                                                                                    : ANSWERED;
  }
  return EVEN_OK;
}

bool even_bring_back_awaits(const even_host_agent *agent) {
  const even_bring_back *back = agent->hosts->back;
  return back != NULL && (back->answers[agent->index] == ASKED || back->from == agent->index);
}

/* ---- waiting ---- */

static even_status turn(even_bring_back *back) {
  const even_agent_observer *observer = &back->job->params->observer;
  even_hosts *hosts = back->job->hosts;
  if (even_stop_asked()) {
    return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while a checkpoint is brought back from another host");
  }
  EVEN_TRY(even_succession_refuse_superseded(hosts));
  EVEN_TRY(even_loop_turn(&hosts->loop, TICK_MS));
  even_hosts_tick(hosts);
  if (observer->tick != NULL) {
    observer->tick(observer->context);
  }
  return EVEN_OK;
}

static bool is_here(const even_host_agent *agent) {
  return agent->link != NULL && agent->fits;
}

/* Whether one is on its way to any host, but for one of which nothing is heard: the disk hangs there, perhaps. */
static bool any_comes(even_bring_back *back) {
  const even_hosts *hosts = back->job->hosts;
  bool any = false;
  back->stuck = 0;
  for (size_t i = 1; i < even_hosts_count(hosts); i++) {
    const even_host_agent *agent = &hosts->agents[i];
    bool stuck = even_bring_awaited_ns(agent) > WRITING_NS;
    any = any || (even_bring_state(agent, NULL) == EVEN_BRING_UNDER_WAY && !stuck);
    back->stuck = stuck ? i : back->stuck;
  }
  return any;
}

/* One that is on its way there, and newer than all that is whole here, shall be there first. */
static even_status await_coming(even_bring_back *back) {
  const even_hosts *hosts = back->job->hosts;
  const char *coming = even_copies_coming(hosts->copies);
  bool newer = coming != NULL && strcmp(coming, back->wish->after) > 0;
  while (newer && any_comes(back)) {
    EVEN_TRY(turn(back));
  }
  return EVEN_OK;
}

/* ---- asking ---- */

/* Where the job's own lie, or would: the same path on every host. */
static even_status own_folder(const even_job *job, even_text *out) {
  even_text_clear(out);
  if (job->params->checkpoint_folder != NULL) {
    return even_path_absolute(job->params->checkpoint_folder, out);
  }
  even_text_format(out, "%s/received", even_text_string(&job->run_folder));
  return even_text_status(out);
}

static void write_question(const even_bring_back *back, const char *folder, even_text *text) {
  const even_bring_back_wish *wish = back->wish;
  even_text received = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(text, 0);
  even_text_format(&received, "%s/received", even_text_string(&back->job->run_folder));
  even_json_object(&json, NULL);
  even_json_unsigned(&json, "serial", back->serial);
  even_json_array(&json, "folders");
  even_json_string(&json, NULL, folder);
  if (strcmp(folder, even_text_string(&received)) != 0) {
    even_json_string(&json, NULL, even_text_string(&received));
  }
  even_json_array_end(&json);
  even_json_string(&json, "after", wish->after);
  even_json_string(&json, "job", wish->job);
  even_json_string(&json, "lineage", wish->lineage);
  even_json_string(&json, "until", wish->until);
  even_json_bool(&json, "any", wish->any);
  even_json_string(&json, "copy", even_text_string(&back->copy));
  even_json_object_end(&json);
  even_text_free(&received);
}

/* Who cannot be asked is lost in a moment. */
even_status even_bring_back_ask(even_bring_back *back) {
  even_hosts *hosts = back->job->hosts;
  even_text folder = EVEN_TEXT_EMPTY;
  const even_copy *copy = even_copies_newest(back->job);
  even_status status = own_folder(back->job, &folder);
  even_text_clear(&back->copy);
  even_text_add(&back->copy, copy == NULL ? "" : even_text_string(&copy->folder));
  if (status == EVEN_OK) {
    status = even_text_status(&back->copy);
  }
  back->serial = ++hosts->brought;
  for (size_t i = 1; i < even_hosts_count(hosts) && status == EVEN_OK; i++) {
    even_host_agent *agent = &hosts->agents[i];
    even_text text = EVEN_TEXT_EMPTY;
    if (!is_here(agent)) {
      continue;
    }
    write_question(back, folder.data, &text);
    status = even_link_send_text(agent->link, EVEN_MESSAGE_SEEK, &text, NULL, 0);
    back->answers[i] = ASKED;
  }
  even_text_free(&folder);
  return status;
}

/* Of those that were asked, one that did not say what it has, and why; NULL: all did. */
static const even_host_agent *unheard(const even_bring_back *back, char why[WORDS]) {
  const even_hosts *hosts = back->job->hosts;
  for (size_t i = 1; i < even_hosts_count(hosts); i++) {
    const even_host_agent *agent = &hosts->agents[i];
    if (back->stuck == i && is_here(agent)) {
      (void)snprintf(why, WORDS, "what was on its way there has not come to its end within %g s: its disk may hang",
                     (double)WRITING_NS * 1e-9);
    } else if (back->answers[i] == CANNOT) {
      (void)snprintf(why, WORDS, "it cannot say what it has");
    } else if (back->answers[i] == ASKED && is_here(agent)) {
      (void)snprintf(why, WORDS, "it did not answer within %g s", (double)PATIENCE_NS * 1e-9);
    } else if (back->answers[i] == ASKED) {
      (void)snprintf(why, WORDS, "it is lost: %.250s", agent->lost_words);
    } else {
      continue;
    }
    return agent;
  }
  return NULL;
}

static bool any_awaited(const even_bring_back *back) {
  const even_hosts *hosts = back->job->hosts;
  for (size_t i = 1; i < even_hosts_count(hosts); i++) {
    if (back->answers[i] == ASKED && is_here(&hosts->agents[i])) {
      return true;
    }
  }
  return false;
}

static even_status hear_all(even_bring_back *back) {
  uint64_t since_ns = even_clock_ns();
  while (any_awaited(back) && even_clock_ns() - since_ns < PATIENCE_NS) {
    EVEN_TRY(turn(back));
  }
  return EVEN_OK;
}

/* The newest first; of one that several hosts have, one on a disk: it needs no memory here. */
static int newest_first(const void *left, const void *right) {
  const found *a = left;
  const found *b = right;
  int order = strcmp(b->order, a->order);
  return order != 0 ? order : (int)a->memory - (int)b->memory;
}

/* ---- bringing one ---- */

/* What the taking of it says, in the words in which a host says it to its leader. */
static void told(void *context, even_text *text) {
  even_bring_back *back = context;
  json_t *content = NULL;
  even_status status = even_text_status(text);
  if (status == EVEN_OK) {
    status = even_json_parse("what came back", text->data, text->length, &content);
  }
  if (status != EVEN_OK) {
    fail(back);
  } else if (json_object_get(content, "status") != NULL) {
    fail_as_said(back, content);
  } else if (json_is_true(json_object_get(content, "holds"))) {
    even_text_clear(&back->place);
    even_text_add(&back->place, even_json_text(content, "folder"));
    back->whole = even_text_status(&back->place) == EVEN_OK;
    if (!back->whole) {
      fail(back);
    }
  }
  json_decref(content);
  even_text_free(text);
}

/* A damaged one of the same name gives way to it where it was the same; another one keeps its name. */
static even_status choose_places(const even_bring_back *back, const found *one, even_text *folder, even_text *other) {
  uint64_t sum = 0;
  char digits[EVEN_BRING_SUM_DIGITS + 1];
  EVEN_TRY(own_folder(back->job, folder));
  even_text_format(folder, "/%s", even_path_name(one->folder));
  EVEN_TRY(even_text_status(folder));
  bool same = even_bring_sum_of(folder->data, &sum) && sum == one->sum;
  even_bring_sum_write(one->sum, digits);
  even_text_add(other, folder->data);
  if (!same) {
    even_text_format(other, "-%.8s", digits);
  }
  return even_text_status(other);
}

static even_status say_send(even_bring_back *back, const found *one) {
  even_host_agent *agent = &back->job->hosts->agents[one->host];
  char digits[EVEN_BRING_SUM_DIGITS + 1];
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_bring_sum_write(one->sum, digits);
  even_json_object(&json, NULL);
  even_json_unsigned(&json, "serial", back->serial);
  even_json_string(&json, "send", one->folder);
  even_json_string(&json, "sum", digits);
  even_json_object_end(&json);
  return even_link_send_text(agent->link, EVEN_MESSAGE_SEEK, &text, NULL, 0);
}

/* Until it is here, or not: EVEN_OK, and `whole` or `failed`. */
static even_status await_files(even_bring_back *back, const found *one, even_bring_take *take) {
  const even_host_agent *agent = &back->job->hosts->agents[one->host];
  while (!back->whole && !back->failed) {
    EVEN_TRY(turn(back));
    even_bring_take_tick(take);
    if (!back->whole && !back->failed && !is_here(agent)) {
      (void)even_fail(EVEN_ERR_PEER_LOST, "host %s is lost: %s", agent->name, agent->lost_words);
      fail(back);
    } else if (!back->whole && !back->failed && even_bring_take_is_idle(take, PATIENCE_NS)) {
      (void)even_fail(EVEN_ERR_TIMEOUT, "nothing came for %g s", (double)PATIENCE_NS * 1e-9);
      fail(back);
    }
  }
  return EVEN_OK;
}

static even_status take_files(even_bring_back *back, const found *one, bool memory, even_bring_take *take) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_text other = EVEN_TEXT_EMPTY;
  even_status status = choose_places(back, one, &folder, &other);
  if (status == EVEN_OK) {
    const even_bring_wish wish = {
        .serial = back->serial, .folder = folder.data, .other = other.data, .sum = one->sum, .memory = memory};
    status = even_bring_take_begin(take, &wish);
  }
  if (status == EVEN_OK) {
    status = say_send(back, one);
  }
  even_text_free(&folder);
  even_text_free(&other);
  return status == EVEN_OK ? await_files(back, one, take) : status;
}

/* What is no error of this host's as such is `failed`. */
static even_status bring(even_bring_back *back, const found *one, bool memory) {
  even_parcels *parcels = back->job->hosts->parcels;
  even_bring_kept kept = {.host = memory ? back->job->params->memory : NULL};
  even_bring_take *take = NULL;
  back->from = one->host;
  back->serial = ++back->job->hosts->brought;
  back->whole = back->failed = false;
  even_status status = even_bring_take_open(parcels, (int)one->host, &kept, told, back, &take);
  if (status == EVEN_OK) {
    status = take_files(back, one, memory, take);
  }
  if (status != EVEN_OK && status != EVEN_ERR_INTERRUPTED) {
    fail(back);
    status = even_succession_refuse_superseded(back->job->hosts);
  }
  const even_error kept_error = *even_error_last();
  even_parcels_withdraw(parcels, EVEN_BRING_BACK_PARCEL);
  even_bring_take_close(take);
  kept.host = NULL; /* the job's */
  even_bring_kept_free(&kept);
  back->from = 0;
  (void)even_error_restore(&kept_error);
  return status;
}

/* What memory does not hold the disk may. */
static even_status bring_somewhere(even_bring_back *back, const found *one) {
  bool memory = one->memory && back->job->params->memory != NULL;
  EVEN_TRY(bring(back, one, memory));
  bool again =
      memory && back->failed && back->why.status != EVEN_ERR_CORRUPT && is_here(&back->job->hosts->agents[one->host]);
  return again ? bring(back, one, false) : EVEN_OK;
}

/* ---- the newest ---- */

/* Whether all hosts of that name have said so. */
static bool lack_it(const even_bring_back *back, const char *name) {
  const even_hosts *hosts = back->job->hosts;
  bool any = false;
  for (size_t i = 1; i < even_hosts_count(hosts); i++) {
    if (strcmp(hosts->agents[i].name, name) == 0 && back->answers[i] != LACKS) {
      return false;
    }
    any = any || strcmp(hosts->agents[i].name, name) == 0;
  }
  return any;
}

/* What this agent has sent, and is not there any more, is no reason to end. Of several copies it knows one host: that
 * is kept in mind, for another may have its own. */
static void forget_what_is_gone(const even_bring_back *back) {
  const even_copy *copy = even_copies_newest(back->job);
  if (copy == NULL || strcmp(even_text_string(&copy->folder), even_text_string(&back->copy)) != 0 ||
      back->job->hosts->params.copies > 1 || !lack_it(back, even_text_string(&copy->host))) {
    return;
  }
  if (back->wish->after[0] == '\0') {
    even_job_notice(back->job, "warning: host %s had a copy of %s (%s there), and has it no more",
                    even_text_string(&copy->host), even_path_name(even_text_string(&copy->folder)),
                    even_text_string(&copy->folder));
  }
  even_copies_forget(back->job);
}

/* Of what could not be brought the newest is named, but one that outlives the job before one that does not. */
static const found *worse_missed(const found *before, const found *now) {
  return before == NULL || (before->memory && !now->memory) ? now : before;
}

/* Another host sees the same files, which were damaged. */
static bool is_known_damaged(const even_bring_back *back, size_t at) {
  const found *one = &back->items[at];
  for (size_t i = 0; i < at && one->mark[0] != '\0'; i++) {
    const found *before = &back->items[i];
    if (before->damaged && before->sum == one->sum && strcmp(before->mark, one->mark) == 0) {
      return true;
    }
  }
  return false;
}

/* Whether each could be read there, and was damaged: `count` of them. */
static bool all_damaged(const even_bring_back *back) {
  for (size_t i = 0; i < back->count; i++) {
    if (!back->items[i].damaged) {
      return false;
    }
  }
  return true;
}

static even_status bring_newest(even_bring_back *back, const found **missed) {
  even_job *job = back->job;
  for (size_t i = 0; i < back->count && !back->whole; i++) {
    found *one = &back->items[i];
    const even_host_agent *agent = &job->hosts->agents[one->host];
    const char *name = even_path_name(one->folder);
    uint64_t since_ns = even_clock_ns();
    one->damaged = is_known_damaged(back, i);
    if (one->damaged) {
      continue;
    }
    if (!is_here(agent)) {
      *missed = worse_missed(*missed, one);
      continue;
    }
    even_job_notice(job, "host %s has %s%s, newer than all that is whole here: it is brought back", agent->name, name,
                    one->memory ? " in its memory" : "");
    EVEN_TRY(bring_somewhere(back, one));
    if (back->whole) {
      even_job_notice(job, "%s was brought back from host %s in %.1f s", name, agent->name,
                      (double)(even_clock_ns() - since_ns) * 1e-9);
    } else {
      one->damaged = back->why.status == EVEN_ERR_CORRUPT;
      *missed = worse_missed(*missed, one);
      even_job_notice(job, "warning: %s could not be brought back from host %s: %.300s", name, agent->name,
                      back->why.what);
    }
  }
  return EVEN_OK;
}

/* There are some, and none of them could be brought. */
static even_status refuse(const even_bring_back *back, const found *missed) {
  const char *host = back->job->hosts->agents[missed->host].name;
  char words[WORDS];
  (void)snprintf(words, sizeof words, ", which could not be brought back: %.250s",
                 back->failed ? back->why.what : "the host is lost");
  if (all_damaged(back)) {
    return even_bring_back_refuse_damaged(host, missed->folder, words);
  }
  return missed->memory ? even_bring_back_refuse_memory(back->job, host, missed->folder, words)
                        : even_bring_back_refuse_anew(back->job, host, missed->folder, words);
}

/* None was brought: what is here is gone on from, where anything is. */
static even_status conclude_without(const even_bring_back *back, const found *missed) {
  char why[WORDS] = "";
  const even_host_agent *silent = unheard(back, why);
  if (back->wish->after[0] == '\0' && missed != NULL) {
    return refuse(back, missed);
  }
  if (silent == NULL || (back->wish->after[0] == '\0' && !back->wish->trained)) {
    return EVEN_OK;
  }
  if (back->wish->after[0] != '\0') {
    even_job_notice(back->job,
                    "warning: host %s may have a newer checkpoint than this one, but %s; the job goes on "
                    "from what is here",
                    silent->name, why);
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_PEER_LOST,
                  "no whole checkpoint of the job is left here, and it is not begun anew, for host %s, which was asked "
                  "for its copies, may have one, but %s",
                  silent->name, why);
  return even_error_fix(
      "once that host can be reached, --name NAME --resume auto goes on from what it has; without --resume training "
      "begins anew");
}

static even_status find(even_bring_back *back) {
  const found *missed = NULL;
  EVEN_TRY(await_coming(back));
  EVEN_TRY(even_bring_back_ask(back));
  EVEN_TRY(hear_all(back));
  forget_what_is_gone(back);
  if (back->count > 1) {
    qsort(back->items, back->count, sizeof *back->items, newest_first);
  }
  EVEN_TRY(bring_newest(back, &missed));
  return back->whole ? EVEN_OK : conclude_without(back, missed);
}

even_status even_bring_back_open(even_job *job, const even_bring_back_wish *wish, even_bring_back **out) {
  *out = NULL;
  EVEN_TRY(EVEN_NEW(out));
  **out = (even_bring_back){.job = job, .wish = wish};
  even_status status = EVEN_NEW_ARRAY(&(*out)->answers, job->hosts->count);
  if (status != EVEN_OK) {
    even_free(*out);
    *out = NULL;
    return status;
  }
  job->hosts->back = *out;
  return EVEN_OK;
}

void even_bring_back_close(even_bring_back *back) {
  back->job->hosts->back = NULL;
  for (size_t i = 0; i < back->count; i++) {
    even_free(back->items[i].folder);
    even_free(back->items[i].order);
  }
  even_free(back->items);
  even_free(back->answers);
  even_text_free(&back->place);
  even_text_free(&back->copy);
  even_free(back);
}

static bool keeps_copies(const even_job *job) {
  const even_hosts *hosts = job->hosts;
  return hosts != NULL && even_hosts_count(hosts) > 1 && (hosts->params.copies > 0 || hosts->params.memory_copies > 0);
}

even_status even_bring_back_newest(even_job *job, const even_bring_back_wish *wish, char **path) {
  even_bring_back *back = NULL;
  *path = NULL;
  if (!keeps_copies(job)) {
    return EVEN_OK;
  }
  EVEN_TRY(even_bring_back_open(job, wish, &back));
  even_status status = find(back);
  if (status == EVEN_OK && back->whole) {
    status = even_duplicate(even_text_string(&back->place), path);
  }
  even_bring_back_close(back);
  return status;
}
