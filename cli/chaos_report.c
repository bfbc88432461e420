/* What `evenstep chaos` tells of its faults, and of the promise. */
#include "base/json_writer.h"
#include "cli/chaos_command.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

void even_chaos_say(const even_chaos_command *on, const char *format, ...) {
  va_list arguments;
  if (!on->json) {
    va_start(arguments, format);
    (void)vprintf(format, arguments);
    va_end(arguments);
    (void)fflush(stdout);
  }
}

static size_t injected(const even_chaos_command *on) {
  size_t count = 0;
  for (int64_t i = 0; i < on->count; i++) {
    count += on->done[i].injected;
  }
  return count;
}

static even_status print_json(const even_chaos_command *on) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 1);
  even_json_object(&json, NULL);
  even_json_bool(&json, "kept", on->broken[0] == '\0');
  even_json_string(&json, "broken", on->broken[0] == '\0' ? NULL : on->broken);
  even_json_integer(&json, "seed", on->seed);
  even_json_string(&json, "recovery", on->job.recovery);
  even_json_unsigned(&json, "planned", (uint64_t)on->count);
  even_json_unsigned(&json, "injected", injected(on));
  even_json_number(&json, "undisturbed_seconds", on->seconds[0]);
  even_json_number(&json, "disturbed_seconds", on->seconds[1]);
  even_json_unsigned(&json, "tensors", on->verdict.tensors);
  even_json_unsigned(&json, "numbers_that_differ", on->verdict.different);
  even_json_number(&json, "largest_relative_norm", on->verdict.largest);
  even_json_array(&json, "faults");
  for (int64_t i = 0; i < on->count; i++) {
    even_json_object(&json, NULL);
    even_json_string(&json, "kind", even_chaos_name(on->plan[i].kind));
    even_json_integer(&json, "rank", on->done[i].injected ? on->done[i].rank : on->plan[i].rank);
    even_json_number(&json, "planned_at", on->plan[i].when);
    even_json_bool(&json, "injected", on->done[i].injected);
    even_json_bool(&json, "impossible", on->done[i].impossible);
    even_json_integer(&json, "at_ns", on->done[i].injected ? (int64_t)on->done[i].at_ns : -1);
    even_json_integer(&json, "noticed_ns", (int64_t)on->done[i].noticed_ns);
    even_json_string(&json, "unnoticed", on->done[i].unnoticed);
    even_json_integer(&json, "gone_ns", (int64_t)on->done[i].gone_ns);
    even_json_integer(&json, "step", on->done[i].injected ? on->done[i].step : -1);
    even_json_string(&json, "what", on->done[i].words);
    even_json_integer(&json, "again_from", on->done[i].again_from);
    even_json_integer(&json, "made_again", on->done[i].made_again);
    even_json_integer(&json, "held", on->done[i].held);
    even_chaos_outcome_json(&on->done[i], &json);
    even_json_object_end(&json);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    (void)printf("%s\n", even_text_string(&text));
  }
  even_text_free(&text);
  return status;
}

static void print_survival(const even_chaos_command *on) {
  even_text text = EVEN_TEXT_EMPTY;
  if (on->recovers && even_chaos_outcome_sum(on->done, (size_t)on->count, &text) == EVEN_OK) {
    even_chaos_say(on, "--recovery %s: %s\n", on->job.recovery, even_text_string(&text));
  }
  even_text_free(&text);
}

static void print_again(const even_chaos_command *on) {
  even_text text = EVEN_TEXT_EMPTY;
  even_chaos_tended_sum(on->done, (size_t)on->count, &text);
  even_chaos_say(on, "%s", even_text_string(&text));
  even_text_clear(&text);
  even_chaos_again_sum(on->done, (size_t)on->count, &text);
  if (text.length > 0) {
    even_chaos_say(on, "%s (a checkpoint every %s)\n", even_text_string(&text), on->job.checkpoint_every);
  }
  even_text_free(&text);
}

/* Whoever reads the last line alone is not to think that more was shown than was. */
static void print_kept(const even_chaos_command *on) {
  size_t came = injected(on);
  if (came == 0) {
    even_chaos_say(on, "NOTHING WAS SHOWN: none of the faults came (why: above)\n");
  } else if (came < (size_t)on->count) {
    even_chaos_say(
        on, "kept under %zu of %" PRId64 " faults; the others DID NOT COME (why: above), and nothing is said of them: ",
        came, on->count);
  } else {
    even_chaos_say(on, "kept: ");
  }
}

static void print_words(const even_chaos_command *on, long steps) {
  char others[256];
  for (int64_t i = 0; i < on->count; i++) {
    const even_chaos_done *done = &on->done[i];
    even_chaos_outcome_words(done, others, sizeof others);
    if (done->injected) {
      even_chaos_say(on, "  step %6ld  %-13s  %s%s\n", done->step, even_chaos_name(on->plan[i].kind), done->words,
                     others);
    } else if (done->impossible) {
      even_chaos_say(on, "  not here     %-13s  %s\n", even_chaos_name(on->plan[i].kind), done->words);
    } else {
      even_chaos_say(
          on, "  not at all   %-13s  the training had come to its end before it could be (planned for step %.0f)%s%s\n",
          even_chaos_name(on->plan[i].kind), on->plan[i].when * (double)steps, done->words[0] == '\0' ? "" : ": ",
          done->words);
    }
  }
  even_chaos_say(on, "disturbed: %.1f s, %zu of %" PRId64 " faults injected\n", on->seconds[1], injected(on),
                 on->count);
  print_survival(on);
  print_again(on);
  if (on->broken[0] != '\0') {
    even_chaos_say(on, "NOT KEPT: %s\n", on->broken);
    return;
  }
  print_kept(on);
  if (on->verdict.different == 0) {
    even_chaos_say(on, "%zu tensors are the same to the bit\n", on->verdict.tensors);
  } else {
    even_chaos_say(on, "%zu tensors, the largest difference in %s: relative norm %.3g (%.3g is allowed)\n",
                   on->verdict.tensors, on->verdict.where, on->verdict.largest, on->tolerance);
  }
}

even_status even_chaos_report(const even_chaos_command *on, long steps) {
  if (on->json) {
    return print_json(on);
  }
  print_words(on, steps);
  return EVEN_OK;
}
