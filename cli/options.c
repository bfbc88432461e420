/* Declared options: parsing, checking, help. */
#include "base/fail.h"
#include "base/nearest.h"
#include "base/utf8.h"
#include "cli/command.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_OPTIONS = 64 };

static const even_option *by_name(const even_option *options, size_t count, const char *name, size_t length) {
  for (size_t i = 0; i < count; i++) {
    if (strlen(options[i].name) == length && strncmp(options[i].name, name, length) == 0) {
      return &options[i];
    }
  }
  return NULL;
}

static const even_option *by_letter(const even_option *options, size_t count, char letter) {
  for (size_t i = 0; i < count; i++) {
    if (options[i].letter == letter) {
      return &options[i];
    }
  }
  return NULL;
}

static even_status unknown(const even_usage *usage, const even_option *options, size_t count, const char *word) {
  const char *names[MOST_OPTIONS + 1];
  char name[64];
  size_t named = 0;
  for (size_t i = 0; i < count && named < MOST_OPTIONS; i++) {
    if (options[i].help != NULL) {
      names[named++] = options[i].name;
    }
  }
  names[named++] = "help";
  (void)snprintf(name, sizeof name, "%s", word + strspn(word, "-"));
  name[strcspn(name, "=")] = '\0';
  const char *nearest = even_nearest(name, names, named);
  even_status status = even_fail(EVEN_ERR_USAGE, "%s: unknown option %s", usage->command, word);
  if (nearest != NULL) {
    (void)even_error_fix("did you mean --%s? See `evenstep %s --help`", nearest, usage->command);
  } else if (usage->stop_at_operand) {
    (void)even_error_fix("options of the script come behind its name; see `evenstep %s --help`", usage->command);
  } else {
    (void)even_error_fix("see `evenstep %s --help`", usage->command);
  }
  return status;
}

static even_status fix_with_help(const even_usage *usage, even_status status) {
  (void)even_error_fix("`evenstep %s --help` says what each option takes", usage->command);
  return status;
}

static even_status set_integer(const even_usage *usage, const even_option *option, const char *text) {
  char *end = NULL;
  errno = 0;
  intmax_t value = strtoimax(text, &end, 10);
  if (errno != 0 || end == text || *end != '\0') {
    even_status status =
        even_fail(EVEN_ERR_USAGE, "%s: --%s wants a whole number, not \"%s\"", usage->command, option->name, text);
    return fix_with_help(usage, status);
  }
  if ((option->minimum != 0 || option->maximum != 0) && (value < option->minimum || value > option->maximum)) {
    even_status status = even_fail(EVEN_ERR_USAGE, "%s: --%s %s is out of range", usage->command, option->name, text);
    (void)even_error_fix("give a number from %" PRId64 " to %" PRId64, option->minimum, option->maximum);
    return status;
  }
  *(int64_t *)option->value = (int64_t)value;
  return EVEN_OK;
}

static even_status set_value(const even_usage *usage, const even_option *option, const char *text) {
  char *end = NULL;
  switch (option->kind) {
    case EVEN_OPTION_FLAG:
      *(bool *)option->value = true;
      return EVEN_OK;
    case EVEN_OPTION_TEXT:
      *(const char **)option->value = text;
      return EVEN_OK;
    case EVEN_OPTION_INTEGER:
      return set_integer(usage, option, text);
    case EVEN_OPTION_NUMBER: {
      double value = strtod(text, &end);
      if (end == text || *end != '\0' || !isfinite(value)) {
        even_status status =
            even_fail(EVEN_ERR_USAGE, "%s: --%s wants a number, not \"%s\"", usage->command, option->name, text);
        return fix_with_help(usage, status);
      }
      *(double *)option->value = value;
      return EVEN_OK;
    }
  }
  return EVEN_OK;
}

/* Takes argv[*at] (an option, and its argument where it has one) and moves *at behind it. */
static even_status take(const even_usage *usage, const even_option *options, size_t count, int argc, char **argv,
                        int *at) {
  char *word = argv[*at];
  const even_option *option = NULL;
  const char *text = NULL;
  if (word[1] == '-') {
    size_t length = strcspn(word + 2, "=");
    option = by_name(options, count, word + 2, length);
    text = word[2 + length] == '=' ? word + 3 + length : NULL;
  } else {
    option = by_letter(options, count, word[1]);
    text = word[2] != '\0' ? word + 2 : NULL;
  }
  if (option == NULL) {
    return unknown(usage, options, count, word);
  }
  (*at)++;
  if (option->kind == EVEN_OPTION_FLAG) {
    if (text != NULL) {
      return fix_with_help(usage, even_fail(EVEN_ERR_USAGE, "%s: --%s takes no value", usage->command, option->name));
    }
  } else if (text == NULL) {
    if (*at >= argc) {
      even_status status = even_fail(EVEN_ERR_USAGE, "%s: --%s wants %s", usage->command, option->name,
                                     option->argument == NULL ? "a value" : option->argument);
      return fix_with_help(usage, status);
    }
    text = argv[(*at)++];
  }
  return set_value(usage, option, text);
}

even_status even_options_parse(const even_usage *usage, const even_option *options, size_t count, int argc, char **argv,
                               int *operand, bool *helped) {
  int operands = 0; /* operands met so far lie at argv[at - operands … at) */
  int at = 0;
  *helped = false;
  while (at < argc) {
    char *word = argv[at];
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
      even_options_help(usage, options, count, stdout);
      *helped = true;
      return EVEN_OK;
    }
    if (strcmp(word, "--") == 0) {
      memmove(&argv[at - operands + 1], &argv[at - operands], (size_t)operands * sizeof *argv);
      at++;
      break;
    }
    if (word[0] != '-' || word[1] == '\0') {
      if (usage->stop_at_operand) {
        break;
      }
      operands++;
      at++;
      continue;
    }
    int before = at;
    EVEN_TRY(take(usage, options, count, argc, argv, &at));
    for (int moved = before; moved < at; moved++) {
      char *taken = argv[moved];
      memmove(&argv[moved - operands + 1], &argv[moved - operands], (size_t)operands * sizeof *argv);
      argv[moved - operands] = taken;
    }
  }
  *operand = at - operands;
  return EVEN_OK;
}

bool even_cli_begin(const even_usage *usage, const even_option *options, size_t count, int argc, char **argv,
                    int most_operands, const char *operand_fix, int *operand, int *code) {
  bool helped = false;
  *code = 0;
  if (even_options_parse(usage, options, count, argc, argv, operand, &helped) != EVEN_OK) {
    *code = even_cli_fail();
    return false;
  }
  if (!helped && most_operands >= 0 && argc - *operand > most_operands) {
    (void)even_fail(EVEN_ERR_USAGE, "%s: \"%s\" is one word too many", usage->command, argv[*operand + most_operands]);
    if (operand_fix != NULL) {
      (void)even_error_fix("%s; see `evenstep %s --help`", operand_fix, usage->command);
    } else {
      (void)even_error_fix("see `evenstep %s --help`", usage->command);
    }
    *code = even_cli_fail();
    return false;
  }
  return !helped;
}

/* Columns that UTF-8 text takes on a terminal: its characters, continuation bytes not counted. */
static int columns(const char *text) {
  int count = 0;
  for (; *text != '\0'; text++) {
    count += ((unsigned char)*text & 0xC0u) == 0x80u ? 0 : 1;
  }
  return count;
}

static void help_line(FILE *stream, const char *left, const char *right) {
  enum { LEFT_COLUMNS = 32 };
  int padding = columns(left) < LEFT_COLUMNS ? LEFT_COLUMNS - columns(left) : 0;
  (void)fprintf(stream, "  %s%*s %s\n", left, padding, "", right);
}

void even_options_help(const even_usage *usage, const even_option *options, size_t count, FILE *stream) {
  (void)fprintf(stream, "usage: %s\n", usage->synopsis);
  if (usage->description != NULL) {
    (void)fprintf(stream, "\n%s\n", usage->description);
  }
  (void)fprintf(stream, "\noptions:\n");
  for (size_t i = 0; i < count; i++) {
    if (options[i].help == NULL) {
      continue;
    }
    char left[64];
    char letter[8] = "    ";
    if (options[i].letter != 0) {
      (void)snprintf(letter, sizeof letter, "-%c, ", options[i].letter);
    }
    (void)snprintf(left, sizeof left, "%s--%s%s%s", letter, options[i].name, options[i].argument != NULL ? " " : "",
                   options[i].argument != NULL ? options[i].argument : "");
    help_line(stream, left, options[i].help);
  }
  help_line(stream, "-h, --help", "this text");
  if (usage->epilogue != NULL) {
    (void)fprintf(stream, "\n%s\n", usage->epilogue);
  }
}

void even_cli_say(void *context, const char *words) {
  (void)context;
  (void)fprintf(stderr, "evenstep: %s\n", words);
}

int even_cli_fail_of(even_status status) {
  /* a failure is never told as a success, whatever became of its record */
  const even_error *error = even_error_of(status == EVEN_OK ? EVEN_ERR_STATE : status);
  char text[sizeof error->what + sizeof error->fix];
  (void)fprintf(stderr, "evenstep: %s\n", even_utf8_clean(error->what, text, sizeof text));
  if (error->fix[0] != '\0') {
    (void)fprintf(stderr, "  fix: %s\n", even_utf8_clean(error->fix, text, sizeof text));
  }
  return even_status_exit_code(error->status);
}

int even_cli_fail(void) {
  return even_cli_fail_of(even_error_last()->status);
}

bool even_cli_colour(FILE *stream) {
  const char *terminal = getenv("TERM");
  const char *no_colour = getenv("NO_COLOR");
  return isatty(fileno(stream)) && (no_colour == NULL || no_colour[0] == '\0') &&
         (terminal == NULL || strcmp(terminal, "dumb") != 0);
}
