/* The program's commands and the options that they declare. A command is one file
 * cli/NAME.c, one line in the table of main.c. */
#ifndef EVEN_CLI_COMMAND_H
#define EVEN_CLI_COMMAND_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef enum even_option_kind {
  EVEN_OPTION_FLAG,    /* bool *       --json */
  EVEN_OPTION_TEXT,    /* const char **  --name demo */
  EVEN_OPTION_INTEGER, /* int64_t *    --port 8080; checked against minimum … maximum */
  EVEN_OPTION_NUMBER   /* double * */
} even_option_kind;

typedef struct even_option {
  char letter;      /* 'n' for -n, 0 for none */
  const char *name; /* "log-rank" for --log-rank */
  even_option_kind kind;
  void *value;          /* where it goes; holds the default before parsing */
  const char *argument; /* "N", shown in the help; NULL for a flag */
  const char *help;     /* one line; NULL: of earlier versions, taken and not told of */
  int64_t minimum;      /* of an INTEGER; both 0: no check */
  int64_t maximum;
} even_option;

typedef struct even_command {
  const char *name;
  const char *summary; /* one line for `evenstep --help` */
  /* arguments after the command's name; returns the exit code */
  int (*run)(int argc, char **argv);
} even_command;

typedef struct even_usage {
  const char *command;     /* "run" */
  const char *synopsis;    /* "evenstep run [options] script.py [arguments]" */
  const char *description; /* a paragraph, may be NULL */
  const char *epilogue;    /* printed after the options (exit codes, examples), may be NULL */
  bool stop_at_operand;    /* options end at the first operand (they belong to the script then) */
} even_usage;

/* Parses options into their values; argv[0] is the first word after the command's name. On EVEN_OK *operand is the
 * index of the first operand (operands are moved behind the options). `--help` sets *helped after printing the help. An
 * unknown option is EVEN_ERR_USAGE with the nearest one named. */
even_status even_options_parse(const even_usage *usage, const even_option *options, size_t count, int argc, char **argv,
                               int *operand, bool *helped) EVEN_MUST_USE;
void even_options_help(const even_usage *usage, const even_option *options, size_t count, FILE *stream);

/* The beginning of a command: parses, prints the help that was asked for, refuses operands beyond `most_operands` (-1:
 * any number; `operand_fix`, may be NULL, says what to do instead). False where the command ends here, with *code. */
bool even_cli_begin(const even_usage *usage, const even_option *options, size_t count, int argc, char **argv,
                    int most_operands, const char *operand_fix, int *operand, int *code) EVEN_MUST_USE;

/* Prints the words for `status` ("evenstep: what" and "  fix: …") to stderr and returns its exit code, never 0: what
 * was returned decides, for the cleaning up behind an error may have left another record, or none. */
int even_cli_fail_of(even_status status);
/* The same for the calling thread's last error, right behind the call that failed. */
int even_cli_fail(void);

/* Before the work: whether the result can be written to `path` (NULL: it is to go nowhere). Beside it a file is made
 * and removed, so folders that are missing, full or read-only are told before minutes are spent; what lies at `path`
 * stays. */
even_status even_cli_check_output(const char *path) EVEN_MUST_USE;

/* A line for the user, on stderr: "evenstep: words". `context` is not looked at. */
void even_cli_say(void *context, const char *words);

/* Whether `stream` is a terminal that may be coloured (NO_COLOR and TERM=dumb are obeyed). */
bool even_cli_colour(FILE *stream);

int even_cli_run(int argc, char **argv);
int even_cli_join(int argc, char **argv);
int even_cli_drain(int argc, char **argv);
int even_cli_agent(int argc, char **argv);
int even_cli_devices(int argc, char **argv);
int even_cli_profile(int argc, char **argv);
int even_cli_plan(int argc, char **argv);
int even_cli_verify(int argc, char **argv);
int even_cli_top(int argc, char **argv);
int even_cli_report(int argc, char **argv);
int even_cli_timeline(int argc, char **argv);
int even_cli_ckpt(int argc, char **argv);
int even_cli_chaos(int argc, char **argv);
int even_cli_doctor(int argc, char **argv);
int even_cli_bench(int argc, char **argv);

#endif
