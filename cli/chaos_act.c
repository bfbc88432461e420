/* The words between `evenstep chaos` and its parts on other hosts. */
#include "cli/chaos_act.h"

#include "base/fail.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WORDS = 7, LONGEST_LINE = 256 };

static const char *const verbs[EVEN_CHAOS_VERBS] = {"do", "lives", "look", "feed"};
static const size_t counts[EVEN_CHAOS_VERBS] = {7, 3, 2, 2};
static const char *const sayings[EVEN_CHAOS_SAYINGS] = {"done", "later", "not", "yes", "no", "open", "over"};

/* As long as a training may be. */
static const double MOST_SECONDS = 1e7;

bool even_chaos_is_done_there(even_chaos_kind kind) {
  switch (kind) {
    case EVEN_CHAOS_KILL:
    case EVEN_CHAOS_STOP:
    case EVEN_CHAOS_SLOW:
    case EVEN_CHAOS_AGENT:
    case EVEN_CHAOS_GARBAGE:
    case EVEN_CHAOS_MEMORY:
    case EVEN_CHAOS_TWIN:
      return true;
    default:
      return false;
  }
}

void even_chaos_act_write(const even_chaos_act *act, even_text *out) {
  even_text_add(out, verbs[act->verb]);
  if (act->verb == EVEN_CHAOS_DO) {
    even_text_format(out, " %s %s %d %ld %.17g %" PRIu64, even_chaos_name(act->kind), act->run, act->rank,
                     (long)act->pid, act->seconds, act->dice);
  } else if (act->verb == EVEN_CHAOS_LIVES) {
    even_text_format(out, " %s %ld", act->run, (long)act->pid);
  } else {
    even_text_format(out, " %d", act->number);
  }
}

void even_chaos_answer_write(const even_chaos_answer *answer, even_text *out) {
  even_text_add(out, sayings[answer->said]);
  if (answer->said == EVEN_CHAOS_SAID_DONE) {
    even_text_format(out, " %d %s", answer->number, answer->words);
  } else if (answer->said == EVEN_CHAOS_SAID_NOT) {
    even_text_format(out, " %s", answer->words);
  } else if (answer->said == EVEN_CHAOS_SAID_OVER) {
    even_text_format(out, " %d %d %s", answer->lack, answer->broken, answer->words);
  }
}

/* ---- reading ---- */

static even_status no_act(const char *line) {
  return even_fail(EVEN_ERR_INPUT, "\"%.80s\" is nothing that a part of evenstep chaos does", line);
}

static bool take_number(const char *word, long long least, long long most, long long *out) {
  char *end = NULL;
  errno = 0;
  *out = strtoll(word, &end, 10);
  return errno == 0 && end != word && *end == '\0' && *out >= least && *out <= most;
}

static bool take_dice(const char *word, uint64_t *out) {
  char *end = NULL;
  errno = 0;
  *out = strtoull(word, &end, 10);
  return errno == 0 && word[0] >= '0' && word[0] <= '9' && *end == '\0';
}

static bool take_seconds(const char *word, double *out) {
  char *end = NULL;
  *out = strtod(word, &end);
  return end != word && *end == '\0' && *out >= 0 && *out <= MOST_SECONDS;
}

static bool take_kind(const char *word, even_chaos_kind *out) {
  for (int kind = 0; kind < EVEN_CHAOS_KINDS; kind++) {
    if (strcmp(word, even_chaos_name((even_chaos_kind)kind)) == 0) {
      *out = (even_chaos_kind)kind;
      return even_chaos_is_done_there(*out);
    }
  }
  return false;
}

static bool take_run(const char *word, char out[EVEN_CHAOS_RUN_NAME]) {
  size_t length = strlen(word);
  if (length >= EVEN_CHAOS_RUN_NAME) {
    return false;
  }
  memcpy(out, word, length + 1);
  return true;
}

/* pid 1 and whole groups are nobody's ranks. */
static bool take_pid(const char *word, pid_t *out) {
  long long number = 0;
  bool good = take_number(word, 2, INT32_MAX, &number);
  *out = (pid_t)number;
  return good;
}

static bool take_words(char *const *words, even_chaos_act *out) {
  long long number = 0;
  bool good = true;
  if (out->verb == EVEN_CHAOS_DO) {
    good = take_kind(words[1], &out->kind) && take_run(words[2], out->run) &&
           take_number(words[3], 0, INT32_MAX, &number) && take_pid(words[4], &out->pid) &&
           take_seconds(words[5], &out->seconds) && take_dice(words[6], &out->dice);
    out->rank = (int)number;
  } else if (out->verb == EVEN_CHAOS_LIVES) {
    good = take_run(words[1], out->run) && take_pid(words[2], &out->pid);
  } else {
    good = take_number(words[1], 0, INT32_MAX, &number);
    out->number = (int)number;
  }
  return good;
}

even_status even_chaos_act_read(const char *line, even_chaos_act *out) {
  char copy[LONGEST_LINE];
  char *words[MOST_WORDS];
  char *rest = NULL;
  size_t count = 0;
  *out = (even_chaos_act){.verb = EVEN_CHAOS_VERBS};
  if (strlen(line) >= sizeof copy) {
    return no_act(line);
  }
  (void)snprintf(copy, sizeof copy, "%s", line);
  for (char *word = strtok_r(copy, " ", &rest); word != NULL; word = strtok_r(NULL, " ", &rest)) {
    if (count == MOST_WORDS) {
      return no_act(line);
    }
    words[count++] = word;
  }
  for (int verb = 0; verb < EVEN_CHAOS_VERBS && count > 0; verb++) {
    if (strcmp(words[0], verbs[verb]) == 0 && counts[verb] == count) {
      out->verb = (even_chaos_verb)verb;
    }
  }
  return out->verb != EVEN_CHAOS_VERBS && take_words(words, out) ? EVEN_OK : no_act(line);
}

/* A number before a blank, or at the end; *at goes behind it. */
static bool take_next(const char **at, long most, int *out) {
  char *end = NULL;
  errno = 0;
  long number = strtol(*at, &end, 10);
  bool good = errno == 0 && end != *at && (*end == ' ' || *end == '\0') && number >= 0 && number <= most;
  *at = *end == ' ' ? end + 1 : end;
  *out = (int)number;
  return good;
}

even_status even_chaos_answer_read(const char *line, even_chaos_answer *out) {
  const size_t length = strcspn(line, " ");
  const char *at = line + length + (line[length] == ' ' ? 1 : 0);
  int broken = 0;
  bool good = true;
  *out = (even_chaos_answer){.said = EVEN_CHAOS_SAYINGS};
  for (int said = 0; said < EVEN_CHAOS_SAYINGS; said++) {
    if (strlen(sayings[said]) == length && memcmp(sayings[said], line, length) == 0) {
      out->said = (even_chaos_said)said;
    }
  }
  if (out->said == EVEN_CHAOS_SAID_DONE) {
    good = take_next(&at, INT32_MAX, &out->number);
  } else if (out->said == EVEN_CHAOS_SAID_OVER) {
    good = take_next(&at, 2, &out->lack) && take_next(&at, 1, &broken);
    out->broken = broken == 1;
  }
  (void)snprintf(out->words, sizeof out->words, "%s", at);
  return good && out->said != EVEN_CHAOS_SAYINGS
             ? EVEN_OK
             : even_fail(EVEN_ERR_INPUT, "\"%.80s\" is no answer of a part of evenstep chaos", line);
}
