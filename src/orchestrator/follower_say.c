/* What an agent that serves a leader tells it: of itself, and what its job's ranks do. */
#include "base/json_writer.h"
#include "orchestrator/boards.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/follower_words.h"
#include "orchestrator/hangs.h"
#include "orchestrator/remote.h"
#include "os/clock.h"

#include <evenstep/version.h>
#include <stdio.h>

/* What ranks print while nobody leads; more of it is in their logs alone. */
enum { MOST_UNTOLD = 256 << 10 };

static void keep_line(even_follower *follower, const even_text *text, const void *data, size_t bytes) {
  even_text *untold = &follower->untold;
  size_t before = untold->length;
  bool room = before + text->length + bytes < MOST_UNTOLD && even_text_status(text) == EVEN_OK;
  if (room && even_message_add(untold, EVEN_MESSAGE_LINE, text->data, text->length, data, bytes) != EVEN_OK) {
    untold->length = before;
    even_error_clear(); /* as above */
  }
}

void even_follower_say_untold(even_follower *follower) {
  const even_text *untold = &follower->untold;
  size_t used = 0;
  size_t wanted = 0;
  for (size_t at = 0; at < untold->length; at += used) {
    even_message one;
    even_text text = EVEN_TEXT_EMPTY;
    if (even_message_next((const unsigned char *)untold->data + at, untold->length - at, &one, &used, &wanted) !=
            EVEN_OK ||
        used == 0) {
      even_error_clear();
      break;
    }
    even_text_append(&text, one.json, one.json_bytes);
    even_follower_tell(follower, EVEN_MESSAGE_LINE, &text, one.data, one.data_bytes);
  }
  even_text_free(&follower->untold);
}

void even_follower_tell(even_follower *follower, even_message_kind kind, even_text *text, const void *data,
                        size_t bytes) {
  if (follower->held && kind != EVEN_MESSAGE_GREET && kind != EVEN_MESSAGE_RUNS) {
    if (kind == EVEN_MESSAGE_LINE) {
      keep_line(follower, text, data, bytes);
    }
    even_text_free(text); /* it is nobody's attempt: its next leader asks for all else */
    return;
  }
  if (even_link_send_text(&follower->link, kind, text, data, bytes) != EVEN_OK) {
    even_error_clear(); /* the leader hears of the end of this host, if of nothing else */
  }
}

void even_follower_say_error(even_follower *follower, even_message_kind kind, const even_error *error) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "status", error->status);
  even_json_string(&json, "what", error->what);
  even_json_string(&json, "fix", error->fix);
  even_json_object_end(&json);
  even_follower_tell(follower, kind, &text, NULL, 0);
}

/* Whom another program has started a leader knows by the number that has told, which stays when hosts are drained. */
static int number_of(even_follower *follower) {
  follower->place = follower->place > 0 ? follower->place : follower->host;
  return follower->launched ? follower->place : follower->host;
}

void even_follower_greet(even_follower *follower) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "evenstep", even_version());
  even_json_integer(&json, "protocol", EVEN_MESSAGE_PROTOCOL);
  even_json_integer(&json, "record_bytes", (int64_t)sizeof(even_record));
  even_json_integer(&json, "host", number_of(follower));
  even_json_unsigned(&json, "member", follower->candidate.self);
  even_json_integer(&json, "voter_port", follower->candidate.port);
  if (follower->joins != NULL && !follower->taken) { /* under the next leader it is one of the job's */
    even_json_bool(&json, "joins", true);
    even_json_integer(&json, "ranks", follower->joins->ranks);
  }
  even_json_bool(&json, "holds", follower->held);
  if (follower->held) {
    even_json_string(&json, "job", follower->job.id);
    even_json_integer(&json, "attempt", follower->job.attempt);
  }
  even_json_object_end(&json);
  even_follower_tell(follower, EVEN_MESSAGE_GREET, &text, NULL, 0);
  if (follower->held) {
    even_text attempt = EVEN_TEXT_EMPTY;
    even_follower_words_attempt(&follower->job, follower->led, atomic_load(even_follower_signals(follower)),
                                even_text_string(&follower->facts), &attempt);
    even_follower_tell(follower, EVEN_MESSAGE_RUNS, &attempt, NULL, 0);
  }
}

/* ---- what the job tells ---- */

void even_job_follower_send(even_job *job, even_message_kind kind, even_text *text) {
  even_follower_tell(job->follower, kind, text, NULL, 0);
}

bool even_job_follower_is_heard(const even_job *job) {
  return !job->follower->held;
}

struct even_voter *even_job_follower_voter(const even_job *job) {
  return job->follower->candidate.voter;
}

void even_job_follower_tell_writes(even_job *job) {
  even_text text = EVEN_TEXT_EMPTY;
  if (even_job_follower_is_heard(job)) {
    even_text_add(&text, "{\"writes\":true}");
    even_follower_tell(job->follower, EVEN_MESSAGE_SETTLED, &text, NULL, 0);
  }
}

void even_follower_forward_records(even_follower *follower) {
  size_t got = follower->reader == NULL || follower->held ? 0 : EVEN_FOLLOWER_RECORDS;
  while (got == EVEN_FOLLOWER_RECORDS && even_link_has_room(&follower->link)) {
    even_text text = EVEN_TEXT_EMPTY;
    got = even_telemetry_reader_drain(follower->reader, follower->records, EVEN_FOLLOWER_RECORDS, NULL);
    if (got > 0) {
      even_remote_write_places(follower->reader, follower->records, got, &text);
      even_follower_tell(follower, EVEN_MESSAGE_RECORDS, &text, follower->records, got * sizeof follower->records[0]);
    }
  }
  even_outlast_part_note(&follower->part, follower->reader);
}

void even_job_follower_tell_end(even_job *job, const even_job_rank *rank) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text tails = EVEN_TEXT_EMPTY;
  even_boards_turn(job); /* what it has said, and the steps that it has made, come before its end */
  even_follower_forward_records(job->follower);
  even_oom_watch_read(&job->oom);
  even_follower_words_end(job, rank, &text, &tails);
  even_follower_tell(job->follower, EVEN_MESSAGE_ENDED, &text, even_text_string(&tails), tails.length);
  even_text_free(&tails);
}

void even_job_follower_tell_stopped(even_job *job, const even_job_rank *rank, int signal) {
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&text, "{\"rank\":%zu,\"signal\":%d}", (size_t)(rank - job->ranks), signal);
  even_follower_tell(job->follower, EVEN_MESSAGE_STOPPED, &text, NULL, 0);
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
    even_follower_tell(job->follower, EVEN_MESSAGE_HUNG, &text, NULL, 0);
  }
}

static void on_notice(void *context, const char *words) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "text", words);
  even_json_object_end(&json);
  even_follower_tell(context, EVEN_MESSAGE_NOTICE, &text, NULL, 0);
}

void even_job_follower_say_notice(even_job *job) {
  const even_host_notice *notice = &job->own_notice;
  even_text text = EVEN_TEXT_EMPTY;
  if (notice->signal == 0 || job->draining != 0 || job->follower->held) {
    return;
  }
  job->draining = notice->signal;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "signal", notice->signal);
  even_json_number(&json, "seconds", even_job_notice_left(job));
  even_json_string(&json, "what", notice->what);
  even_json_object_end(&json);
  even_follower_tell(job->follower, EVEN_MESSAGE_DRAIN, &text, NULL, 0);
}

bool even_job_follower_drains(even_job *job, const even_notice *notice) {
  even_host_notice *own = &job->own_notice;
  if (job->draining != 0 || own->signal != 0) {
    return notice->signal == SIGUSR1;
  }
  *own = (even_host_notice){.signal = notice->signal, .seconds = notice->seconds, .at_ns = even_clock_ns()};
  (void)snprintf(own->what, sizeof own->what, "%s", notice->what);
  even_job_follower_say_notice(job);
  return true;
}

void even_follower_untell_notice(even_follower *follower) {
  follower->job.draining = 0;
}

void even_job_follower_signalled(even_job *job, int number) {
  even_follower *follower = job->follower;
  char words[64];
  if (number == SIGINT && follower->joins != NULL && job->draining == 0 && job->own_notice.signal == 0) {
    /* its user's own word: it would leave */
    (void)even_job_follower_drains(job, &(even_notice){.signal = number, .what = ""});
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
  even_follower_tell(context, EVEN_MESSAGE_STARTED, &text, NULL, 0);
}

static bool is_wanted(const even_follower *follower, int rank) {
  const even_remote_start *start = &follower->start;
  return start->shown[rank] || (start->shows_main && even_job_main_rank(&follower->job) == rank);
}

/* A leader that cannot keep up gets fewer lines; the log here has all. */
static void on_line(void *context, int rank, bool error, const char *line, size_t length) {
  even_follower *follower = context;
  even_text text = EVEN_TEXT_EMPTY;
  size_t most = even_message_most_data(EVEN_MESSAGE_LINE);
  if (!is_wanted(follower, rank) || !even_link_has_room(&follower->link)) {
    return;
  }
  even_text_format(&text, "{\"rank\":%d,\"error\":%s}", rank, error ? "true" : "false");
  even_follower_tell(follower, EVEN_MESSAGE_LINE, &text, line, length < most ? length : most);
}

static void on_hang(void *context, int rank, bool over, const char *words) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "rank", rank);
  even_json_bool(&json, "over", over);
  even_json_string(&json, "words", words);
  even_json_object_end(&json);
  even_follower_tell(context, EVEN_MESSAGE_HANG, &text, NULL, 0);
}

even_agent_observer even_follower_observer(even_follower *follower) {
  return (even_agent_observer){
      .context = follower, .rank_started = on_rank_started, .line = on_line, .hang = on_hang, .notice = on_notice};
}

/* That it goes on, too: it may have been let go on while no agent was here that could tell. */
static void retell_stopped(even_job *job, const even_job_rank *rank) {
  if (!rank->stands || rank->stopped_by != 0) {
    even_job_follower_tell_stopped(job, rank, rank->stands ? rank->stopped_by : 0);
  }
}

void even_follower_say_ranks(even_follower *follower) {
  even_job *job = &follower->job;
  for (size_t i = 0; i < job->count; i++) {
    const even_job_rank *rank = &job->ranks[i];
    if (!even_job_is_here(job, i)) {
      continue;
    }
    if (rank->alive) {
      on_rank_started(follower, (int)i, rank->pid);
      retell_stopped(job, rank);
    } else if (rank->pid != 0) {
      even_job_follower_tell_end(job, rank);
    }
  }
  even_job_follower_tell_hung(job); /* once for each is told by its watch, which may have been while nobody led */
}
