/* The leader's side: who lacks the checkpoint gets its files, one after the other. */
#include "orchestrator/bring.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/stop.h"
#include "orchestrator/elastic.h"
#include "orchestrator/host_memory.h"
#include "os/clock.h"
#include "os/path.h"

#include <evenstep/checkpoint.h>
#include <string.h>

enum { TICK_MS = 50, MOST_OVERDUE = 2 };

typedef enum bring_state { ASKED, SENDING, HOLDS, FAILED } bring_state;

typedef struct even_bring {
  bring_state state;
  bool quiet;
  bool memory; /* to the host's */
  bool came;   /* what the host has of it came there */
  uint64_t serial;
  uint64_t asked_ns; /* since when the host's own word is awaited; 0: a file is on its way */
  even_bring_files files;
  even_error why;
} even_bring;

static void free_bring(even_bring *bring) {
  if (bring != NULL) {
    even_bring_files_free(&bring->files);
    even_free(bring);
  }
}

void even_bring_drop(even_host_agent *agent) {
  free_bring(agent->bring);
  agent->bring = NULL;
  even_text_free(&agent->resume);
}

/* The last error is why. */
static void fail(even_bring *bring) {
  bring->state = FAILED;
  bring->why = *even_error_last();
  even_error_clear();
}

/* ---- sending ---- */

static even_status send_next(even_host_agent *agent);

/* One that was begun before another was asked for is nobody's affair any more. */
static void sent(void *context, const even_parcel *parcel, const even_error *why) {
  even_host_agent *agent = context;
  even_bring *bring = agent->bring;
  if (bring == NULL || bring->state != SENDING || parcel->number / EVEN_BRING_FILES != bring->serial) {
    return;
  }
  if (why != NULL) {
    (void)even_error_restore(why);
    fail(bring);
  } else if (send_next(agent) != EVEN_OK) {
    fail(bring);
  }
}

static even_status send_next(even_host_agent *agent) {
  even_bring *bring = agent->bring;
  const uint64_t before = bring->files.sent_bytes;
  EVEN_TRY(even_bring_files_send_next(&bring->files, agent->hosts->parcels, (int)agent->index, EVEN_BRING_PARCEL,
                                      bring->serial, sent, agent));
  bring->asked_ns = bring->files.sent_bytes > before ? 0 : even_clock_ns();
  return EVEN_OK;
}

/* ---- asking ---- */

/* Where the host keeps it: in the same place as here, or in its run folder where that is taken. */
static even_status ask(even_host_agent *agent, const even_job *job) {
  const char *folder = even_text_string(&agent->bring->files.folder);
  const char *slash = strrchr(folder, '/');
  char digits[EVEN_BRING_SUM_DIGITS + 1];
  even_text other = EVEN_TEXT_EMPTY;
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_bring_sum_write(agent->bring->files.sum, digits);
  even_text_format(&other, "%s/received%s", even_text_string(&job->run_folder), slash == NULL ? "/" : slash);
  even_json_object(&json, NULL);
  even_json_unsigned(&json, "serial", agent->bring->serial);
  even_json_integer(&json, "host", (int64_t)agent->index); /* hosts that come and go give others other numbers */
  even_json_string(&json, "folder", folder);
  even_json_string(&json, "other", even_text_string(&other));
  even_json_string(&json, "sum", digits);
  if (agent->bring->memory) {
    even_json_bool(&json, "memory", true);
    even_json_bool(&json, "unseen", even_host_memory_has(job->params->memory, folder)); /* by any other host */
  }
  even_json_object_end(&json);
  even_status status = even_text_status(&other);
  even_text_free(&other);
  if (status != EVEN_OK) {
    even_text_free(&text);
    return status;
  }
  return even_link_send_text(agent->link, EVEN_MESSAGE_CHECKPOINT, &text, NULL, 0);
}

static even_status read_new(const char *folder, bool quiet, bool memory, even_bring **out) {
  EVEN_TRY(EVEN_NEW(out));
  (*out)->quiet = quiet;
  (*out)->memory = memory;
  even_status status = even_bring_files_read(folder, quiet, &(*out)->files);
  if (status != EVEN_OK) {
    free_bring(*out);
    *out = NULL;
  }
  return status;
}

static bool goes_on(const even_bring *before, const even_bring *now) {
  return before != NULL && (before->state == ASKED || before->state == SENDING) &&
         before->files.sum == now->files.sum && before->memory == now->memory &&
         strcmp(even_text_string(&before->files.folder), even_text_string(&now->files.folder)) == 0;
}

even_status even_bring_begin(even_job *job, even_host_agent *agent, const char *folder, bool quiet, bool memory) {
  even_bring *bring = NULL;
  if (agent->link == NULL) {
    return even_fail(EVEN_ERR_PEER_LOST, "host %s is lost: %s", agent->name, agent->lost_words);
  }
  EVEN_TRY(read_new(folder, quiet, memory, &bring));
  if (goes_on(agent->bring, bring)) {
    agent->bring->quiet = agent->bring->quiet && quiet;
    free_bring(bring);
    return EVEN_OK;
  }
  even_bring_drop(agent);
  agent->bring = bring;
  bring->serial = ++agent->hosts->brought;
  bring->asked_ns = even_clock_ns();
  return ask(agent, job);
}

even_bring_step even_bring_state(const even_host_agent *agent, const even_error **why) {
  if (agent->bring == NULL || agent->link == NULL) {
    return EVEN_BRING_NONE;
  }
  if (agent->bring->state == FAILED && why != NULL) {
    *why = &agent->bring->why;
  }
  return agent->bring->state == HOLDS    ? EVEN_BRING_HOLDS
         : agent->bring->state == FAILED ? EVEN_BRING_FAILED
                                         : EVEN_BRING_UNDER_WAY;
}

double even_bring_overdue_seconds(const even_host_agent *agent) {
  if (even_bring_state(agent, NULL) != EVEN_BRING_UNDER_WAY || agent->bring->asked_ns == 0) {
    return 0;
  }
  uint64_t more_ns = agent->bring->files.info.bytes / EVEN_BRING_WRITING_BYTES * UINT64_C(1000000000);
  uint64_t given_ns = EVEN_BRING_WRITING_NS + more_ns;
  return even_clock_ns() - agent->bring->asked_ns > given_ns ? (double)given_ns * 1e-9 : 0;
}

bool even_bring_hangs(const even_host_agent *agent) {
  return agent->overdue >= MOST_OVERDUE;
}

bool even_bring_was_sent(const even_host_agent *agent) {
  return agent->bring != NULL && agent->bring->files.next > 0;
}

bool even_bring_had_come(const even_host_agent *agent) {
  return agent->bring != NULL && agent->bring->came && !even_bring_was_sent(agent);
}

void even_bring_traffic(const even_host_agent *agent, uint64_t *sent_bytes, uint64_t *spared_bytes) {
  *sent_bytes = agent->bring == NULL ? 0 : agent->bring->files.sent_bytes;
  *spared_bytes = agent->bring == NULL ? 0 : agent->bring->files.spared_bytes;
}

/* ---- what a host says ---- */

static void hear_where(even_host_agent *agent, const json_t *content) {
  const char *folder = json_string_value(json_object_get(content, "folder"));
  even_text_clear(&agent->resume);
  even_text_add(&agent->resume, folder == NULL ? "" : folder);
  if (folder == NULL || folder[0] != '/' || even_text_status(&agent->resume) != EVEN_OK) {
    (void)even_fail(EVEN_ERR_INPUT, "it does not say where the checkpoint lies there");
    fail(agent->bring);
  } else {
    agent->bring->state = HOLDS;
    agent->overdue = 0;
    agent->bring->came = json_is_true(json_object_get(content, "came"));
  }
}

static void hear_lacks(even_host_agent *agent) {
  even_bring *bring = agent->bring;
  if (bring->state != ASKED) {
    return;
  }
  bring->state = SENDING;
  if (!bring->quiet) {
    even_job_notice(agent->hosts->job, "host %s does not have %s: it is sent there (%.1f MB)", agent->name,
                    even_text_string(&bring->files.folder), (double)bring->files.info.bytes / 1e6);
  }
  if (send_next(agent) != EVEN_OK) {
    fail(bring);
  }
}

even_status even_bring_hear(even_host_agent *agent, const json_t *content) {
  even_bring *bring = agent->bring;
  json_int_t status = json_integer_value(json_object_get(content, "status"));
  if (bring == NULL || (uint64_t)json_integer_value(json_object_get(content, "serial")) != bring->serial ||
      bring->state == HOLDS || bring->state == FAILED) {
    return EVEN_OK; /* of one that is not asked for any more */
  }
  if (status != EVEN_OK) {
    (void)even_fail(status > EVEN_OK && status <= EVEN_ERR_INTERRUPTED ? (even_status)status : EVEN_ERR_SYSTEM,
                    "%.560s", even_json_text(content, "what"));
    (void)even_error_fix("%s", even_json_text(content, "fix"));
    fail(bring);
  } else if (json_is_array(json_object_get(content, "had"))) {
    even_bring_files_spare(&bring->files, json_object_get(content, "had")); /* once it knows the manifest */
  } else if (json_is_true(json_object_get(content, "holds"))) {
    hear_where(agent, content);
  } else {
    hear_lacks(agent);
  }
  return EVEN_OK;
}

/* ---- all hosts ---- */

static bool is_settled(const even_host_agent *agent) {
  return agent->link == NULL || agent->bring == NULL || agent->bring->state == HOLDS || agent->bring->state == FAILED;
}

static even_status conclude(const even_host_agent *agent, bool all) {
  if (!all && (agent->link == NULL || agent->bring == NULL)) {
    return EVEN_OK; /* lost before, or since */
  }
  if (agent->link == NULL || agent->bring == NULL) {
    return even_fail(EVEN_ERR_PEER_LOST, "host %s is lost: %s", agent->name, agent->lost_words);
  }
  if (agent->bring->state == FAILED) {
    (void)even_error_restore(&agent->bring->why);
    (void)even_error_prefix("host %s cannot have the checkpoint %s", agent->name,
                            even_text_string(&agent->bring->files.folder));
    return even_error_fix(
        "free memory or disk there, or keep checkpoints in a folder that all hosts see: "
        "--checkpoint-dir");
  }
  return EVEN_OK;
}

static bool gets_it(const even_job *job, const even_host_agent *agent, bool all) {
  return job->resume.length > 0 && (all || (agent->link != NULL && even_elastic_stays(agent)));
}

/* Its end is told with the next tick, as that of any connection. */
static void give_up_overdue(even_host_agent *agent) {
  double seconds = even_bring_overdue_seconds(agent);
  if (seconds > 0) {
    (void)even_fail(EVEN_ERR_TIMEOUT,
                    "what was sent there of %.120s has not come to its end within %g s: its disk may hang",
                    even_path_name(even_text_string(&agent->bring->files.folder)), seconds);
    even_link_give_up(agent->link);
    agent->overdue++;
  }
}

static even_status turn(even_job *job) {
  const even_agent_observer *observer = &job->params->observer;
  even_hosts *hosts = job->hosts;
  if (even_stop_asked()) {
    return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while hosts get the checkpoint");
  }
  EVEN_TRY(even_loop_turn(&hosts->loop, TICK_MS));
  for (size_t i = 1; i < even_hosts_count(hosts); i++) {
    give_up_overdue(&hosts->agents[i]);
  }
  even_hosts_tick(hosts);
  if (observer->tick != NULL) {
    observer->tick(observer->context);
  }
  return EVEN_OK;
}

static even_status bring_to(even_job *job, bool all) {
  even_hosts *hosts = job->hosts;
  bool settled = false;
  for (size_t i = 1; i < even_hosts_count(hosts); i++) {
    if (!gets_it(job, &hosts->agents[i], all)) {
      even_bring_drop(&hosts->agents[i]);
    } else {
      EVEN_TRY(even_bring_begin(job, &hosts->agents[i], job->resume.data, false,
                                even_host_memory_has(job->params->memory, job->resume.data)));
    }
  }
  while (job->resume.length > 0 && !settled) {
    EVEN_TRY(turn(job));
    settled = true;
    for (size_t i = 1; i < even_hosts_count(hosts); i++) {
      settled = settled && is_settled(&hosts->agents[i]);
    }
  }
  for (size_t i = 1; job->resume.length > 0 && i < even_hosts_count(hosts); i++) {
    EVEN_TRY(conclude(&hosts->agents[i], all));
  }
  return EVEN_OK;
}

even_status even_bring_to_all(even_job *job) {
  return bring_to(job, true);
}

even_status even_bring_to_those_here(even_job *job) {
  return bring_to(job, false);
}
