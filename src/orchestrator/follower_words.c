/* The end of a rank, and of an attempt. */
#include "orchestrator/follower_words.h"

#include "base/json_writer.h"
#include "orchestrator/boards.h"
#include "orchestrator/remote.h"

enum { MOST_TAIL = 32000, BOARDS = 8 };

static const char *tail_of(const even_text *tail, size_t *bytes) {
  *bytes = tail->length < MOST_TAIL ? tail->length : MOST_TAIL;
  return tail->data == NULL ? "" : tail->data + (tail->length - *bytes);
}

void even_follower_words_end(const even_job *job, const even_job_rank *rank, even_text *out, even_text *tails) {
  size_t output = 0;
  size_t error = 0;
  const char *output_tail = tail_of(&rank->output.streams[0].tail, &output);
  const char *error_tail = tail_of(&rank->output.streams[1].tail, &error);
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "rank", rank - job->ranks);
  even_json_integer(&json, "signal", rank->end.signal);
  even_json_integer(&json, "code", rank->end.code);
  even_json_bool(&json, "stopped_by_agent", rank->stopped_by_agent);
  even_json_bool(&json, "stood_still", rank->stood_still);
  even_json_bool(&json, "out_of_memory", even_job_facts(job, (size_t)(rank - job->ranks)).out_of_memory);
  even_json_unsigned(&json, "peak_memory_bytes", rank->end.peak_memory_bytes);
  even_json_unsigned(&json, "output_bytes", output);
  even_json_object_end(&json);
  even_text_append(tails, output_tail, output);
  even_text_append(tails, error_tail, error);
}

void even_follower_words_recalled(int rank, int signal, even_text *json) {
  even_text_format(json, "{\"rank\":%d,\"signal\":%d,\"code\":0,\"stopped_by_agent\":true,\"output_bytes\":0}", rank,
                   signal);
}

void even_follower_words_settled(even_job *job, even_text *out) {
  even_json json = even_json_begin(out, 0);
  even_oom_watch_read(&job->oom);
  even_json_object(&json, NULL);
  even_json_array(&json, "out_of_memory");
  for (size_t i = 0; i < job->count; i++) {
    if (!job->ranks[i].elsewhere && even_job_facts(job, i).out_of_memory) {
      even_json_integer(&json, NULL, (int64_t)i);
    }
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
}

void even_follower_words_attempt(const even_job *job, uint64_t led, uint64_t signals, const char *facts,
                                 even_text *out) {
  uint32_t newest = job->generation == NULL ? 0 : even_generation_number(job->generation);
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "attempt", job->attempt);
  even_json_unsigned(&json, "led", led);
  even_json_unsigned(&json, "signals", signals);
  even_json_integer(&json, "world", (int64_t)job->count);
  even_json_integer(&json, "groups", job->most_groups);
  even_json_integer(&json, "first", (int64_t)job->first);
  even_json_integer(&json, "count", (int64_t)job->local);
  even_json_integer(&json, "first_spare", (int64_t)job->first_spare);
  even_json_integer(&json, "spares", (int64_t)job->spares);
  even_json_integer(&json, "all_spares", job->params->spares);
  even_json_array(&json, "vacant"); /* of a host that came late: where no process was started yet */
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_is_here(job, i) && !job->ranks[i].alive && job->ranks[i].pid == 0) {
      even_json_integer(&json, NULL, (int64_t)i);
    }
  }
  even_json_array_end(&json);
  even_json_array(&json, "generations");
  for (uint32_t number = newest < BOARDS ? 0 : newest - BOARDS + 1; job->generation != NULL && number <= newest;
       number++) {
    even_text board = EVEN_TEXT_EMPTY;
    even_boards_write(job, number, &board);
    even_json_raw(&json, NULL, even_text_string(&board));
    even_text_free(&board);
  }
  even_json_array_end(&json);
  even_json_raw(&json, "facts", facts[0] == '\0' ? "{}" : facts);
  even_json_object_end(&json);
}
