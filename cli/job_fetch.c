/* Has Python, where the drivers of other places are, bring a checkpoint here. */
#include "cli/job_fetch.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/stop.h"
#include "base/utf8.h"
#include "cli/ckpt_python.h"
#include "cli/python.h"
#include "os/clock.h"
#include "os/dialogue.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LOOK_MS = 200, MOST_SHOWN = 480 };
static const char module[] = "evenstep.checkpoint_remote";
static const double usual_seconds = 120;
/* Python itself sees that a place does not answer. That it says nothing at all, for so much longer, is its own fault:
 * a driver that holds all of it, a disk from which it cannot be read. */
static const double python_seconds = 180;

static even_status read_seconds(const char *name, double usual, double *seconds) {
  const char *text = getenv(name);
  char *end = NULL;
  *seconds = usual;
  if (text == NULL || text[0] == '\0') {
    return EVEN_OK;
  }
  *seconds = strtod(text, &end);
  if (end == text || *end != '\0' || !(*seconds > 0)) {
    (void)even_fail(EVEN_ERR_USAGE, "%s=%.100s is no time to wait for checkpoints", name, text);
    return even_error_fix("give seconds, such as 300, or inf to wait for ever");
  }
  return EVEN_OK;
}

even_status even_job_fetch_limit(double *seconds) {
  double upload = 0; /* Python's own: what is wrong is told before ranks start */
  EVEN_TRY(read_seconds("EVENSTEP_UPLOAD_TIMEOUT", usual_seconds, &upload));
  return read_seconds("EVENSTEP_FETCH_TIMEOUT", usual_seconds, seconds);
}

/* Down the pipe: other users see the words of a command line. */
static even_status ask(const even_job_fetcher *fetcher, const even_agent_wish *wish, even_dialogue *dialogue) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_string(&json, "url", wish->url != NULL ? wish->url : fetcher->url);
  even_json_string(&json, "folder", wish->folder);
  even_json_string(&json, "after", wish->after);
  even_json_string(&json, "job", wish->job);
  even_json_string(&json, "lineage", wish->lineage);
  even_json_string(&json, "until", wish->until);
  even_json_object_end(&json);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    status = even_dialogue_say(dialogue, text.data);
  }
  explicit_bzero(text.data, text.data == NULL ? 0 : text.length);
  even_text_free(&text);
  return status;
}

static even_status fail_silent(double seconds) {
  (void)even_fail(EVEN_ERR_TIMEOUT, "the Python that fetches a checkpoint has said nothing for %.0f s", seconds);
  return even_error_fix("look for a driver that stands still, or a disk; EVENSTEP_FETCH_TIMEOUT waits longer");
}

/* NULL: it has closed its output. */
static even_status hear_line(const even_agent_wish *wish, double limit_seconds, even_dialogue *dialogue,
                             const char **line) {
  uint64_t since_ns = even_clock_ns();
  even_status status = EVEN_ERR_TIMEOUT;
  while (status == EVEN_ERR_TIMEOUT) {
    double seconds = (double)(even_clock_ns() - since_ns) * 1e-9;
    if (even_stop_asked()) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while a checkpoint was fetched");
    }
    if (seconds > limit_seconds + python_seconds) {
      return fail_silent(seconds);
    }
    if (wish->meanwhile != NULL) {
      wish->meanwhile(wish->meanwhile_context);
    }
    status = even_dialogue_hear(dialogue, LOOK_MS, line);
  }
  return status;
}

/* A line is a notice, a sign of life, or the answer: *answered. */
static even_status take_line(const even_job_fetcher *fetcher, const char *line, bool *answered, char **path) {
  char shown[MOST_SHOWN];
  json_t *said = NULL;
  EVEN_TRY(even_json_parse("what is said of checkpoints at another place", line, strlen(line), &said));
  const char *notice = json_string_value(json_object_get(said, "notice"));
  const char *found = json_string_value(json_object_get(said, "report"));
  even_status status = EVEN_OK;
  if (notice != NULL) {
    fetcher->tell(fetcher->context, even_utf8_clean(notice, shown, sizeof shown));
  } else if (json_object_get(said, "lives") == NULL) {
    *answered = true;
    status = found == NULL      ? even_ckpt_python_error(module, said)
             : found[0] == '\0' ? EVEN_OK
                                : even_duplicate(found, path);
  }
  json_decref(said);
  return status;
}

/* What a driver's traceback says may hold the URL in full. */
static even_status ended_early(const even_dialogue *dialogue, const char *python) {
  char complaint[MOST_SHOWN];
  even_text shown = EVEN_TEXT_EMPTY;
  even_dialogue_complaint(dialogue, complaint, sizeof complaint);
  even_text_add_shown(&shown, complaint);
  (void)even_fail(EVEN_ERR_SYSTEM, "%s ended without an answer%s%s", python, shown.length == 0 ? "" : ": ",
                  even_text_string(&shown));
  even_text_free(&shown);
  return even_error_fix("`evenstep doctor` says whether that interpreter has torch and evenstep");
}

static even_status converse(const even_job_fetcher *fetcher, const even_agent_wish *wish, even_dialogue *dialogue,
                            const char *python, char **path) {
  bool answered = false;
  double limit_seconds = usual_seconds;
  EVEN_TRY(even_job_fetch_limit(&limit_seconds));
  even_status status = ask(fetcher, wish, dialogue);
  while (status == EVEN_OK && !answered) {
    const char *line = NULL;
    status = hear_line(wish, limit_seconds, dialogue, &line);
    if (status == EVEN_OK && line == NULL) {
      status = ended_early(dialogue, python);
    } else if (status == EVEN_OK && line[0] == '{') { /* what a driver prints is none of ours */
      status = take_line(fetcher, line, &answered, path);
    }
  }
  return status;
}

static even_status fetch(void *context, const even_agent_wish *wish, char **path) {
  const even_job_fetcher *fetcher = context;
  const char *words[] = {NULL, "-m", module, "bring", NULL};
  even_text python = EVEN_TEXT_EMPTY;
  even_dialogue dialogue;
  *path = NULL;
  even_status status = even_cli_python(fetcher->python, &python);
  if (status == EVEN_OK) {
    words[0] = even_text_string(&python);
    status = even_dialogue_start((char **)(uintptr_t)words, &dialogue);
    if (status == EVEN_OK) {
      status = converse(fetcher, wish, &dialogue, words[0], path);
      even_dialogue_end(&dialogue);
    }
  }
  even_text_free(&python);
  return status;
}

even_agent_elsewhere even_job_elsewhere(even_job_fetcher *fetcher) {
  even_agent_elsewhere elsewhere = {
      .context = fetcher, .kept = fetcher->url != NULL && fetcher->url[0] != '\0', .fetch = fetch};
  if (even_job_fetch_limit(&elsewhere.patience_seconds) != EVEN_OK) {
    even_error_clear(); /* it was looked at when the job was set up */
  }
  return elsewhere;
}
