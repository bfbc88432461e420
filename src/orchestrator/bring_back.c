/* The newest checkpoint that another host has comes back to its leader: which ones there are, and which is taken. */
#include "orchestrator/bring_back_parts.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/stop.h"
#include "orchestrator/bring.h"
#include "orchestrator/bring_give.h"
#include "orchestrator/copies.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/path.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TICK_MS = 50, WORDS = 320 };

/* ---- hearing ---- */

static even_status take_one(even_bring_back *back, const even_host_agent *agent, const json_t *one) {
  const char *folder = even_json_text(one, "folder");
  const char *order = even_json_text(one, "order");
  even_bring_found new = {.host = agent->index, .memory = json_is_true(json_object_get(one, "memory"))};
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

even_status even_bring_back_hear(even_host_agent *agent, const json_t *content) {
  even_bring_back *back = agent->hosts->back;
  const json_t *list = json_object_get(content, "found");
  if (back == NULL || (uint64_t)json_integer_value(json_object_get(content, "serial")) != back->serial) {
    return EVEN_OK; /* of one that is not asked for any more */
  }
  if (back->from == agent->index && json_object_get(content, "status") != NULL) {
    even_bring_back_fail_as_said(back, content);
  } else if (back->from == 0 && back->answers[agent->index] == EVEN_BRING_ASKED) {
    EVEN_TRY(take_found(back, agent, list));
    back->answers[agent->index] = !json_is_array(list)                              ? EVEN_BRING_CANNOT
                                  : json_is_false(json_object_get(content, "left")) ? EVEN_BRING_LACKS
                                                                                    : EVEN_BRING_ANSWERED;
  }
  return EVEN_OK;
}

bool even_bring_back_awaits(const even_host_agent *agent) {
  const even_bring_back *back = agent->hosts->back;
  return back != NULL && (back->answers[agent->index] == EVEN_BRING_ASKED || back->from == agent->index);
}

/* ---- waiting ---- */

even_status even_bring_back_turn(even_bring_back *back) {
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

bool even_bring_back_reaches(const even_host_agent *agent) {
  return agent->link != NULL && agent->fits;
}

/* Whether one is on its way to any host, but for one of which nothing is heard: the disk hangs there, perhaps. */
static bool any_comes(even_bring_back *back) {
  const even_hosts *hosts = back->job->hosts;
  bool any = false;
  back->stuck = 0;
  for (size_t i = 1; i < even_hosts_count(hosts); i++) {
    const even_host_agent *agent = &hosts->agents[i];
    double overdue = even_bring_overdue_seconds(agent);
    any = any || (even_bring_state(agent, NULL) == EVEN_BRING_UNDER_WAY && overdue == 0);
    if (overdue > 0) {
      back->stuck = i;
      back->stuck_seconds = overdue;
    }
  }
  return any;
}

/* One that is on its way there, and newer than all that is whole here, shall be there first. */
static even_status await_coming(even_bring_back *back) {
  const even_hosts *hosts = back->job->hosts;
  const char *coming = even_copies_coming(hosts->copies);
  bool newer = coming != NULL && strcmp(coming, back->wish->after) > 0;
  while (newer && any_comes(back)) {
    EVEN_TRY(even_bring_back_turn(back));
  }
  return EVEN_OK;
}

/* ---- asking ---- */

/* `copy`: the host's; NULL: nothing is known to have come there. */
static void write_question(const even_bring_back *back, const char *folder, const even_copy *copy, even_text *text) {
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
  even_json_string(&json, "copy", copy == NULL ? "" : even_text_string(&copy->folder));
  even_json_object_end(&json);
  even_text_free(&received);
}

static bool has_answered(const even_bring_back *back, size_t host) {
  return back->answers[host] != EVEN_BRING_NOT_ASKED && back->answers[host] != EVEN_BRING_ASKED;
}

/* Who cannot be asked is lost in a moment. */
even_status even_bring_back_ask(even_bring_back *back) {
  even_hosts *hosts = back->job->hosts;
  even_text folder = EVEN_TEXT_EMPTY;
  even_status status = even_bring_back_own_folder(back->job, &folder);
  (void)even_copies_newest(back->job); /* what comes from here on is not asked for, and not missed */
  back->serial = ++hosts->brought;
  for (size_t i = 1; i < even_hosts_count(hosts) && status == EVEN_OK; i++) {
    even_host_agent *agent = &hosts->agents[i];
    even_text text = EVEN_TEXT_EMPTY;
    if (!even_bring_back_reaches(agent) || has_answered(back, i)) {
      continue;
    }
    write_question(back, folder.data, even_copies_of(back->job, agent->name), &text);
    status = even_link_send_text(agent->link, EVEN_MESSAGE_SEEK, &text, NULL, 0);
    back->answers[i] = EVEN_BRING_ASKED;
  }
  even_text_free(&folder);
  return status;
}

/* Of those that were asked, one that did not say what it has, and why; NULL: all did. */
static const even_host_agent *unheard(const even_bring_back *back, char why[WORDS]) {
  const even_hosts *hosts = back->job->hosts;
  for (size_t i = 1; i < even_hosts_count(hosts); i++) {
    const even_host_agent *agent = &hosts->agents[i];
    if (back->stuck == i && even_bring_back_reaches(agent)) {
      (void)snprintf(why, WORDS, "what was on its way there has not come to its end within %g s: its disk may hang",
                     back->stuck_seconds);
    } else if (back->answers[i] == EVEN_BRING_CANNOT) {
      (void)snprintf(why, WORDS, "it cannot say what it has");
    } else if (back->answers[i] == EVEN_BRING_ASKED && even_bring_back_reaches(agent)) {
      (void)snprintf(why, WORDS, "it did not answer within %g s", (double)EVEN_BRING_PATIENCE_NS * 1e-9);
    } else if (back->answers[i] == EVEN_BRING_ASKED) {
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
    if (back->answers[i] == EVEN_BRING_ASKED && even_bring_back_reaches(&hosts->agents[i])) {
      return true;
    }
  }
  return false;
}

static even_status hear_all(even_bring_back *back) {
  uint64_t since_ns = even_clock_ns();
  while (any_awaited(back) && even_clock_ns() - since_ns < EVEN_BRING_PATIENCE_NS) {
    EVEN_TRY(even_bring_back_turn(back));
  }
  return EVEN_OK;
}

/* The newest first; of one that several hosts have, one on a disk: it needs no memory here. */
static int newest_first(const void *left, const void *right) {
  const even_bring_found *a = left;
  const even_bring_found *b = right;
  int order = strcmp(b->order, a->order);
  return order != 0 ? order : (int)a->memory - (int)b->memory;
}

/* ---- the newest ---- */

/* Whether all hosts of that name have said so, and this is the first of them. */
static bool lack_it(const even_bring_back *back, size_t host) {
  const even_hosts *hosts = back->job->hosts;
  for (size_t i = 1; i < even_hosts_count(hosts); i++) {
    bool same = strcmp(hosts->agents[i].name, hosts->agents[host].name) == 0;
    if (same && (i < host || back->answers[i] != EVEN_BRING_LACKS)) {
      return false;
    }
  }
  return true;
}

/* What this agent has sent, and is not there any more, is no reason to end. Another host may have its own. */
static void forget_what_is_gone(const even_bring_back *back) {
  const even_hosts *hosts = back->job->hosts;
  for (size_t i = 1; i < even_hosts_count(hosts); i++) {
    const char *name = hosts->agents[i].name;
    const even_copy *copy = lack_it(back, i) ? even_copies_of(back->job, name) : NULL;
    if (copy == NULL) {
      continue;
    }
    if (back->wish->after[0] == '\0') {
      even_job_notice(back->job, "warning: host %s had a copy of %s (%s there), and has it no more", name,
                      even_path_name(even_text_string(&copy->folder)), even_text_string(&copy->folder));
    }
    even_copies_miss(back->job, name);
  }
}

/* Of what could not be brought the newest is named, but one that outlives the job before one that does not. */
static const even_bring_found *worse_missed(const even_bring_found *before, const even_bring_found *now) {
  return before == NULL || (before->memory && !now->memory) ? now : before;
}

/* Another host sees the same files, which were damaged. */
static bool is_known_damaged(const even_bring_back *back, size_t at) {
  const even_bring_found *one = &back->items[at];
  for (size_t i = 0; i < at && one->mark[0] != '\0'; i++) {
    const even_bring_found *before = &back->items[i];
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

/* Of those that did not come. */
static const even_bring_found *missed(const even_bring_back *back) {
  const even_bring_found *worst = NULL;
  for (size_t i = 0; i < back->count; i++) {
    worst = worse_missed(worst, &back->items[i]);
  }
  return worst;
}

/* Each is tried once, also where others are found after it. */
static even_status bring_newest(even_bring_back *back) {
  even_job *job = back->job;
  for (size_t i = 0; i < back->count && !back->whole; i++) {
    even_bring_found *one = &back->items[i];
    const even_host_agent *agent = &job->hosts->agents[one->host];
    const char *name = even_path_name(one->folder);
    uint64_t since_ns = even_clock_ns();
    one->damaged = one->damaged || is_known_damaged(back, i);
    if (one->tried || one->damaged || !even_bring_back_reaches(agent)) {
      continue;
    }
    one->tried = true;
    even_job_notice(job, "host %s has %s%s, newer than all that is whole here: it is brought back", agent->name, name,
                    one->memory ? " in its memory" : "");
    EVEN_TRY(even_bring_back_one(back, one));
    if (back->whole) {
      char spared[64] = "";
      if (back->spared_bytes > 0) {
        (void)snprintf(spared, sizeof spared, " (%.1f MB of it were here already)", (double)back->spared_bytes * 1e-6);
      }
      even_job_notice(job, "%s was brought back from host %s in %.1f s%s", name, agent->name,
                      (double)(even_clock_ns() - since_ns) * 1e-9, spared);
    } else {
      one->damaged = back->why.status == EVEN_ERR_CORRUPT;
      even_job_notice(job, "warning: %s could not be brought back from host %s: %.300s", name, agent->name,
                      back->why.what);
    }
  }
  return EVEN_OK;
}

/* There are some, and none of them could be brought. */
static even_status refuse(const even_bring_back *back, const even_bring_found *one) {
  const char *host = back->job->hosts->agents[one->host].name;
  char words[WORDS];
  (void)snprintf(words, sizeof words, ", which could not be brought back: %.250s",
                 back->failed ? back->why.what : "the host is lost");
  if (all_damaged(back)) {
    return even_bring_back_refuse_damaged(host, one->folder, words);
  }
  return one->memory ? even_bring_back_refuse_memory(back->job, host, one->folder, words)
                     : even_bring_back_refuse_anew(back->job, host, one->folder, words);
}

/* None was brought: what is here is gone on from, where anything is. */
static even_status conclude_without(const even_bring_back *back) {
  char why[WORDS] = "";
  const even_host_agent *silent = unheard(back, why);
  if (back->wish->after[0] == '\0' && back->count > 0) {
    return refuse(back, missed(back));
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

/* Of those behind `index` the first that is lost, and has a copy; NULL: none. */
static even_host_agent *lost_with_copy(const even_bring_back *back, size_t index) {
  even_hosts *hosts = back->job->hosts;
  bool starts = hosts->params.shell != NULL || hosts->params.returns || hosts->params.restarts;
  for (size_t i = index + 1; starts && i < even_hosts_count(hosts); i++) {
    even_host_agent *agent = &hosts->agents[i];
    if (agent->lost && !agent->came && even_copies_of(back->job, agent->name) != NULL) {
      return agent;
    }
  }
  return NULL;
}

/* Starts its agent again, which the restart would do next, too. *here: it has come. */
static even_status await_lost(even_bring_back *back, even_host_agent *agent, bool *here) {
  even_hosts *hosts = back->job->hosts;
  char words[sizeof agent->lost_words];
  even_job_notice(back->job,
                  "no whole checkpoint of the job is left here, and host %s, which is lost (%.200s), has a copy: it is "
                  "waited for (up to %g s, EVENSTEP_HOSTS_PATIENCE)",
                  agent->name, agent->lost_words, hosts->params.patience_seconds);
  even_host_agent_drop(agent);
  agent->returns = agent->member != 0; /* as the same member, if its host has kept what it was */
  even_status status = even_host_agent_launch(agent);
  status = status == EVEN_OK ? even_hosts_await(hosts) : status;
  *here = status == EVEN_OK && even_bring_back_reaches(agent);
  if (*here || status == EVEN_ERR_INTERRUPTED || status == EVEN_ERR_MEMORY) {
    return status;
  }
  (void)snprintf(words, sizeof words, "%.300s", status == EVEN_OK ? agent->lost_words : even_error_last()->what);
  even_error_clear();
  even_host_agent_drop(agent);
  agent->lost = true;
  (void)snprintf(agent->lost_words, sizeof agent->lost_words, "%s", words);
  even_job_notice(back->job, "host %s does not come back: %s", agent->name, words);
  return even_succession_refuse_superseded(hosts);
}

/* What it could not give, for it was lost, it may now. */
static void try_again(even_bring_back *back, size_t host) {
  for (size_t i = 0; i < back->count; i++) {
    back->items[i].tried = back->items[i].tried && back->items[i].host != host;
  }
}

/* Asks those that have not answered yet. */
static even_status look_round(even_bring_back *back) {
  EVEN_TRY(even_bring_back_ask(back));
  EVEN_TRY(hear_all(back));
  forget_what_is_gone(back);
  if (back->count > 1) {
    qsort(back->items, back->count, sizeof *back->items, newest_first);
  }
  return bring_newest(back);
}

/* Nothing is here, and nothing of the hosts that are could be brought: those that are lost, and have a copy, are waited
 * for, one after the other. */
static even_status look_with_lost(even_bring_back *back) {
  even_host_agent *lost = back->whole ? NULL : lost_with_copy(back, 0);
  while (lost != NULL) {
    bool here = false;
    EVEN_TRY(await_lost(back, lost, &here));
    try_again(back, lost->index);
    EVEN_TRY(here ? look_round(back) : EVEN_OK);
    lost = back->whole ? NULL : lost_with_copy(back, lost->index);
  }
  return EVEN_OK;
}

static even_status find(even_bring_back *back) {
  EVEN_TRY(await_coming(back));
  EVEN_TRY(look_round(back));
  if (back->wish->after[0] == '\0') {
    EVEN_TRY(look_with_lost(back));
  }
  return back->whole ? EVEN_OK : conclude_without(back);
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
