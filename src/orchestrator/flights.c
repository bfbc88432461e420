/* When a job fails: the last collectives of its ranks, from the memory of their groups, into logs/flight.json and in a
 * few lines. The ranks hold that memory; it is read before they are ended, and written when they have been told. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_writer.h"
#include "orchestrator/job.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/shared_memory.h"

#include <evenstep/flight.h>
#include <string.h>

enum { MOST_GROUPS = 64, MOST_LINES = 4, MOST_RANKS = 256 };

/* A rank that waits for so long is news also where the user ended the job. */
static const uint64_t long_wait_ns = 10000000000u;

typedef struct found_groups {
  even_flight *flights[MOST_GROUPS];
  uint64_t identities[MOST_GROUPS];
  size_t count;
} found_groups;

/* A group that is part of a larger one leaves the record to that. */
static bool has_calls(const even_flight *flight) {
  even_flight_call call;
  for (int rank = 0; rank < even_flight_ranks(flight); rank++) {
    if (even_flight_read(flight, rank, &call, 1) > 0) {
      return true;
    }
  }
  return false;
}

static bool take_group(void *context, int fd, uint64_t identity) {
  found_groups *found = context;
  for (size_t i = 0; i < found->count; i++) {
    if (found->identities[i] == identity) {
      return true;
    }
  }
  even_flight *flight = NULL;
  if (even_flight_open(fd, &flight) != EVEN_OK) {
    return true;
  }
  if (!has_calls(flight)) {
    even_flight_close(flight);
    return true;
  }
  found->flights[found->count] = flight;
  found->identities[found->count++] = identity;
  return found->count < MOST_GROUPS;
}

static void find_groups(const even_job *job, found_groups *found) {
  found->count = 0;
  for (size_t i = 0; i < job->count && found->count < MOST_GROUPS; i++) {
    if (job->ranks[i].alive && !job->ranks[i].elsewhere) {
      (void)!even_shared_memory_each(job->ranks[i].pid, "evenstep-group", take_group, found); /* gone meanwhile */
    }
  }
}

/* The job's rank that has this process, -1: none (a process below a rank's). */
static int rank_of_process(const even_job *job, long process) {
  for (size_t i = 0; i < job->count; i++) {
    if ((long)job->ranks[i].pid == process && !job->ranks[i].elsewhere) {
      return (int)i;
    }
  }
  return -1;
}

static void write_call(even_json *json, const even_flight_call *call, uint64_t now_ns) {
  static const char *const states[] = {
      [EVEN_FLIGHT_BEGUN] = "begun", [EVEN_FLIGHT_DONE] = "done", [EVEN_FLIGHT_FAILED] = "failed"};
  unsigned state = (unsigned)call->state;
  even_json_object(json, NULL);
  even_json_unsigned(json, "number", call->number);
  even_json_string(json, "call", call->call);
  even_json_string(json, "site", call->site);
  even_json_string(json, "state", state >= EVEN_FLIGHT_BEGUN && state <= EVEN_FLIGHT_FAILED ? states[state] : "");
  even_json_number(json, "began_seconds_ago", (double)(int64_t)(now_ns - call->began_ns) * 1e-9);
  if (call->ended_ns != 0) {
    even_json_number(json, "ended_seconds_ago", (double)(int64_t)(now_ns - call->ended_ns) * 1e-9);
  }
  even_json_object_end(json);
}

static void write_group(even_json *json, const even_job *job, const even_flight *flight, uint64_t now_ns) {
  even_flight_call calls[EVEN_FLIGHT_CALLS];
  even_json_object(json, NULL);
  even_json_integer(json, "size", even_flight_ranks(flight));
  even_json_array(json, "ranks");
  for (int rank = 0; rank < even_flight_ranks(flight) && rank < MOST_RANKS; rank++) {
    long process = even_flight_process(flight, rank);
    even_json_object(json, NULL);
    even_json_integer(json, "rank_in_group", rank);
    even_json_integer(json, "rank", rank_of_process(job, process));
    even_json_integer(json, "process", process);
    even_json_array(json, "calls");
    size_t count = even_flight_read(flight, rank, calls, EVEN_FLIGHT_CALLS);
    for (size_t i = 0; i < count; i++) {
      write_call(json, &calls[i], now_ns);
    }
    even_json_array_end(json);
    even_json_object_end(json);
  }
  even_json_array_end(json);
  even_json_object_end(json);
}

static even_status make_record(const even_job *job, const found_groups *found, uint64_t now_ns, even_text *out) {
  even_json json = even_json_begin(out, 1);
  even_json_object(&json, NULL);
  even_json_integer(&json, "attempt", job->attempt);
  even_json_array(&json, "groups");
  for (size_t i = 0; i < found->count; i++) {
    write_group(&json, job, found->flights[i], now_ns);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
  even_text_add(out, "\n");
  return even_text_status(out);
}

static even_status write_file(const even_job *job, const even_text *record) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/logs/flight.json", job->run_folder.data);
  even_status status = even_text_status(record);
  status = status == EVEN_OK ? even_text_status(&path) : status;
  if (status == EVEN_OK) {
    status = even_file_replace(path.data, record->data, record->length);
  }
  even_text_free(&path);
  return status;
}

/* How long the one of this host that waits longest in the group waits; 0: nobody is in a collective. Of ranks of other
 * hosts (without a process here) nothing newer need have come than what they told once, as they waited for long. */
static uint64_t longest_wait(const even_flight *flight, uint64_t now_ns) {
  uint64_t longest = 0;
  for (int rank = 0; rank < even_flight_ranks(flight) && rank < MOST_RANKS; rank++) {
    even_flight_call call;
    if (even_flight_process(flight, rank) != 0 && even_flight_read(flight, rank, &call, 1) == 1 &&
        call.state != EVEN_FLIGHT_DONE) {
      uint64_t wait = now_ns > call.began_ns ? now_ns - call.began_ns : 1;
      longest = wait > longest ? wait : longest;
    }
  }
  return longest;
}

void even_job_flights_take(even_job *job) {
  const even_error kept = *even_error_last();
  found_groups *found = NULL;
  if (job->flights_told || EVEN_NEW(&found) != EVEN_OK) {
    return;
  }
  job->flights_told = true;
  find_groups(job, found);
  uint64_t now_ns = even_clock_ns();
  if (found->count > 0) {
    (void)!make_record(job, found, now_ns, &job->flights); /* its status is looked at when it is written */
  }
  size_t lines = 0;
  for (size_t i = 0; i < found->count; i++) {
    uint64_t wait = longest_wait(found->flights[i], now_ns);
    if (lines < MOST_LINES && (job->interrupted == 0 ? wait > 0 : wait >= long_wait_ns)) {
      char reached[400];
      even_flight_summary(found->flights[i], reached, sizeof reached);
      even_text_append(&job->flight_lines, reached, strlen(reached) + 1);
      lines++;
    }
    even_flight_close(found->flights[i]);
  }
  even_free(found);
  (void)even_error_restore(&kept);
}

void even_job_flights_tell(even_job *job) {
  const even_error kept = *even_error_last();
  even_job_flights_take(job);
  if (job->flights.length > 0 && write_file(job, &job->flights) != EVEN_OK) {
    even_job_notice(job, "the flight record cannot be written: %s", even_error_last()->what);
  }
  const even_text *lines = &job->flight_lines;
  for (size_t at = 0; even_text_status(lines) == EVEN_OK && at < lines->length; at += strlen(lines->data + at) + 1) {
    even_job_notice(job, "collectives of a group (its own ranks' numbers; logs/flight.json has more): %s",
                    lines->data + at);
  }
  even_job_flights_forget(job);
  (void)even_error_restore(&kept);
}

void even_job_flights_forget(even_job *job) {
  even_text_free(&job->flights);
  even_text_free(&job->flight_lines);
}
