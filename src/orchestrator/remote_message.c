/* What the leader's job hears of the ranks on other hosts. */
#include "orchestrator/remote.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "base/utf8.h"
#include "orchestrator/boards.h"
#include "orchestrator/bring.h"
#include "orchestrator/bring_back.h"
#include "orchestrator/drain_move.h"
#include "orchestrator/elastic.h"
#include "orchestrator/hangs.h"
#include "orchestrator/returns.h"
#include "orchestrator/standing.h"
#include "orchestrator/succession.h"
#include "orchestrator/usages.h"
#include "orchestrator/waiting.h"
#include "os/clock.h"

#include <stdio.h>

static const double MOST_NOTICE_SECONDS = 1e6;

static even_job_rank *rank_in(even_job *job, const even_host_agent *agent, json_int_t rank) {
  bool its = rank >= 0 && even_host_agent_has(agent, (size_t)rank);
  return its ? &job->ranks[rank] : NULL;
}

static even_job_rank *rank_named(even_job *job, const even_host_agent *agent, const json_t *content) {
  return rank_in(job, agent, json_integer_value(json_object_get(content, "rank")));
}

static int number_of(const json_t *content, const char *name) {
  return (int)json_integer_value(json_object_get(content, name));
}

static bool flag_of(const json_t *content, const char *name) {
  return json_is_true(json_object_get(content, name));
}

static void take_started(even_job *job, even_job_rank *rank, const json_t *content) {
  const even_agent_observer *observer = &job->params->observer;
  rank->pid = (pid_t)number_of(content, "process");
  if (observer->rank_started != NULL) {
    observer->rank_started(observer->context, (int)(rank - job->ranks), rank->pid);
  }
  even_job_replace_started(job, (size_t)(rank - job->ranks));
}

static even_status keep_tail(even_rank_output *output, int stream, const unsigned char *data, size_t bytes) {
  even_text *tail = &output->streams[stream].tail;
  even_text_clear(tail);
  if (bytes > 0) {
    even_text_append(tail, (const char *)data, bytes);
  }
  return even_text_status(tail);
}

static even_status take_ended(even_job *job, even_job_rank *rank, const json_t *content, const even_message *message) {
  json_int_t output = json_integer_value(json_object_get(content, "output_bytes"));
  if (output < 0 || (size_t)output > message->data_bytes) {
    return even_fail(EVEN_ERR_INPUT, "the end of a rank, with %lld bytes of output", (long long)output);
  }
  if (!rank->alive) {
    return EVEN_OK;
  }
  EVEN_TRY(keep_tail(&rank->output, 0, message->data, (size_t)output));
  EVEN_TRY(keep_tail(&rank->output, 1, message->data + output, message->data_bytes - (size_t)output));
  bool asked = rank->stopped_by_agent;
  rank->stopped_by_agent = flag_of(content, "stopped_by_agent");
  rank->stood_still = flag_of(content, "stood_still");
  rank->out_of_memory = flag_of(content, "out_of_memory");
  if (job->generation != NULL && job->stage == EVEN_JOB_RUNS && rank->stopped_by_agent && !asked) {
    rank->stopped_by_agent = false; /* not by this one */
    rank->lost = "its agent was ended there";
  }
  const even_process_end end = {
      .pid = rank->pid,
      .signal = number_of(content, "signal"),
      .code = number_of(content, "code"),
      .peak_memory_bytes = (uint64_t)json_integer_value(json_object_get(content, "peak_memory_bytes"))};
  even_job_rank_ended(job, rank, &end);
  return EVEN_OK;
}

static void take_line(even_job *job, const even_host_agent *agent, const even_message *message, const json_t *content) {
  const even_agent_observer *observer = &job->params->observer;
  even_job_rank *rank = rank_named(job, agent, content);
  even_job_tell_main_rank(job); /* of ranks that outlasted their leader nobody here was told it */
  if (rank != NULL && observer->line != NULL) {
    observer->line(observer->context, (int)(rank - job->ranks), flag_of(content, "error"), (const char *)message->data,
                   message->data_bytes);
  }
}

static void take_settled(even_job *job, even_host_agent *agent, const json_t *content) {
  size_t at = 0;
  json_t *rank = NULL;
  if (flag_of(content, "writes")) {
    agent->writes_ns = even_clock_ns();
    return;
  }
  json_array_foreach(json_object_get(content, "out_of_memory"), at, rank) {
    even_job_rank *victim = rank_in(job, agent, json_integer_value(rank));
    if (victim != NULL) {
      victim->out_of_memory = true;
    }
  }
  agent->busy = false;
}

/* The agent there could not do its part: as it is here, that is the end of the job. */
static even_status take_failed(even_job *job, even_host_agent *agent, const json_t *content) {
  int status = number_of(content, "status");
  if (agent->came && agent->late) { /* the others go on as if its connection had ended */
    return even_fail(EVEN_ERR_PEER_LOST, "its agent could not do its part: %.400s", even_json_text(content, "what"));
  }
  if (even_elastic_failed(agent, even_json_text(content, "what")) ||
      even_returns_failed(agent, even_json_text(content, "what"))) {
    return EVEN_OK;
  }
  agent->busy = false;
  if (job->failure.status == EVEN_OK) {
    const even_error kept = *even_error_last();
    (void)even_fail(status > EVEN_OK && status <= EVEN_ERR_INTERRUPTED ? (even_status)status : EVEN_ERR_SYSTEM,
                    "host %s: %.560s", agent->name, even_json_text(content, "what"));
    (void)even_error_fix("%s", even_json_text(content, "fix"));
    job->failure = *even_error_last();
    (void)even_error_restore(&kept);
  }
  return EVEN_OK;
}

/* Its host must end soon. */
static void take_drain(even_job *job, even_host_agent *agent, const json_t *content) {
  char what[EVEN_NOTICE_WORDS];
  double seconds = json_number_value(json_object_get(content, "seconds"));
  const even_notice notice = {.signal = number_of(content, "signal"),
                              .seconds = seconds > 0 && seconds <= MOST_NOTICE_SECONDS ? seconds : 0,
                              .what = even_utf8_clean(even_json_text(content, "what"), what, sizeof what)};
  even_elastic_notice(job, agent, &notice);
}

/* Signal 0: it was let go on, or may have been. */
static void take_stopped(even_job *job, even_job_rank *rank, int signal) {
  if (signal == 0 && rank->stands) {
    even_job_rank_continues(job, rank);
  } else if (signal == 0) {
    return;
  } else if (job->stage == EVEN_JOB_RUNS) {
    even_job_rank_stopped(job, rank, signal);
  }
}

static even_status take_of_rank(even_job *job, even_host_agent *agent, const even_message *message,
                                const json_t *content) {
  even_job_rank *rank = rank_named(job, agent, content);
  if (rank == NULL) {
    return even_fail(EVEN_ERR_INPUT, "a message of a rank that is not on host %s", agent->name);
  }
  switch (message->kind) {
    case EVEN_MESSAGE_STARTED:
      take_started(job, rank, content);
      return EVEN_OK;
    case EVEN_MESSAGE_STOPPED:
      take_stopped(job, rank, number_of(content, "signal"));
      return EVEN_OK;
    case EVEN_MESSAGE_HANG:
      rank->hung = rank->hung && !flag_of(content, "over");
      if (job->params->observer.hang != NULL) {
        job->params->observer.hang(job->params->observer.context, (int)(rank - job->ranks), flag_of(content, "over"),
                                   even_json_text(content, "words"));
      }
      return EVEN_OK;
    case EVEN_MESSAGE_HUNG:
      (void)snprintf(rank->hung_words, sizeof rank->hung_words, "%s", even_json_text(content, "words"));
      rank->hung = true;
      if (job->hangs != NULL && job->waiting.all) { /* so do this host's ranks */
        even_hangs_end(job->hangs);
      } else {
        even_job_end_hung(job);
      }
      return EVEN_OK;
    default:
      return take_ended(job, rank, content, message);
  }
}

static even_status take_content(even_job *job, even_host_agent *agent, const even_message *message,
                                const json_t *content) {
  switch (message->kind) {
    case EVEN_MESSAGE_STARTED:
    case EVEN_MESSAGE_STOPPED:
    case EVEN_MESSAGE_HUNG:
    case EVEN_MESSAGE_HANG:
    case EVEN_MESSAGE_ENDED:
      return take_of_rank(job, agent, message, content);
    case EVEN_MESSAGE_LINE:
      take_line(job, agent, message, content);
      return EVEN_OK;
    case EVEN_MESSAGE_NOTICE:
      even_job_notice(job, "host %s: %.400s", agent->name, even_json_text(content, "text"));
      return EVEN_OK;
    case EVEN_MESSAGE_SETTLED:
      take_settled(job, agent, content);
      return EVEN_OK;
    case EVEN_MESSAGE_FAILED:
      return take_failed(job, agent, content);
    case EVEN_MESSAGE_HOLDS:
      return even_bring_hear(agent, content);
    case EVEN_MESSAGE_FOUND:
      return even_bring_back_hear(agent, content);
    case EVEN_MESSAGE_VOTES:
      even_succession_take_votes(job, agent, content);
      return EVEN_OK;
    case EVEN_MESSAGE_PLACED:
      even_move_hear(agent, content);
      return EVEN_OK;
    case EVEN_MESSAGE_DRAIN:
      take_drain(job, agent, content);
      return EVEN_OK;
    case EVEN_MESSAGE_BOARD:
      return even_boards_take(job, agent, content);
    case EVEN_MESSAGE_STANDING:
      return even_job_standing_take(job, agent, content);
    case EVEN_MESSAGE_WAITING:
      return even_job_waiting_take(job, agent, content, even_clock_ns());
    case EVEN_MESSAGE_USAGE:
      return even_usages_take(job, agent, content);
    default:
      return even_fail(EVEN_ERR_INPUT, "a message of kind %d, which hosts do not send", (int)message->kind);
  }
}

even_status even_hosts_job_message(even_host_agent *agent, const even_message *message) {
  even_job *job = agent->hosts->job;
  json_t *content = NULL;
  bool early = message->kind == EVEN_MESSAGE_FOUND || message->kind == EVEN_MESSAGE_DRAIN; /* before the job is there */
  if (job == NULL && !early) {
    return EVEN_OK; /* it comes too late for anybody */
  }
  if (message->kind == EVEN_MESSAGE_RECORDS) {
    return even_remote_take_records(job, agent, message);
  }
  EVEN_TRY(even_json_parse("what another host says", message->json, message->json_bytes, &content));
  even_status status = take_content(job, agent, message, content);
  json_decref(content);
  return status;
}
