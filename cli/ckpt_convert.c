/* evenstep ckpt convert IN OUT, and evenstep ckpt export PATH --to OUT: both are done by evenstep.ckpt_convert in
 * Python, where torch is, which prints what came of it as one line of JSON. */
#include "base/fail.h"
#include "cli/ckpt.h"
#include "cli/ckpt_python.h"
#include "cli/command.h"

#include <inttypes.h>
#include <string.h>

typedef struct conversion {
  const char *input, *output; /* `output` of --to, where that is how it is named */
  const char *kind, *model, *config, *python;
  int64_t shard_bytes, ranks, zero_stage; /* 0: not given */
  bool force, weights_only, json;
} conversion;

#define FORMATS                                                                                                        \
  "formats that are read, told by their content:\n"                                                                    \
  "  Evenstep checkpoints; files of torch.save (a state_dict, the usual dictionary of a training, Lightning's\n"       \
  "  .ckpt), nothing in which is ever run; .safetensors; Hugging Face folders; folders of\n"                           \
  "  torch.distributed.checkpoint; DeepSpeed folders (ZeRO 1, 2, 3); TensorFlow checkpoints\n"                         \
  "\n"                                                                                                                 \
  "formats that are written (--as):\n"                                                                                 \
  "  evenstep     a checkpoint for --resume and es.load_checkpoint\n"                                                  \
  "  torch        a state_dict in a file of torch.save\n"                                                              \
  "  six-key      the same with model_state_dict, optimizer_state_dict, scheduler_state_dict, epoch, step, metrics\n"  \
  "  lightning    a .ckpt                          dcp    a folder of torch.distributed.checkpoint\n"                  \
  "  safetensors  one file                         hf     a Hugging Face folder\n"                                     \
  "  tensorflow   a folder with model.index and model.data, weights alone\n"                                           \
  "  deepspeed    a folder as ZeRO 1, 2 or 3 writes it (--zero-stage): latest, and files of each rank (--ranks)\n"     \
  "\n"                                                                                                                 \
  "exit code: 0 done (what could not be carried over is listed), 2 a wrong option, 3 the input is not there, holds\n"  \
  "code instead of weights, or the output exists, 5 the system refused (disk full), 6 the input is damaged, 8 it is\n" \
  "of a kind that cannot be read"

static const even_usage convert_usage = {
    .command = "ckpt convert",
    .synopsis = "evenstep ckpt convert [options] IN OUT",
    .description =
        "Writes the checkpoint IN in another format: weights, and what both formats can name of the optimizers,\n"
        "schedulers, step, epoch and the user's own entries. What is left out is listed. Without --as, OUT's name\n"
        "decides: .pt and .pth six-key, .ckpt lightning, .safetensors, else an Evenstep checkpoint. OUT grows under\n"
        "another name and is there when it is whole.\n"
        "To resume on another number of ranks nothing has to be converted: every Evenstep checkpoint does that.",
    .epilogue = FORMATS};

static const even_usage export_usage = {
    .command = "ckpt export",
    .synopsis = "evenstep ckpt export [options] PATH --to OUT",
    .description =
        "Writes the weights of a checkpoint for other tools. Without --as, OUT's name decides: .pt, .pth, .bin and\n"
        ".ckpt torch, .safetensors, else a Hugging Face folder. OUT grows under another name and is there when it is\n"
        "whole.",
    .epilogue = FORMATS};

enum { NUMBER_ROOM = 24, NUMBERS = 3 };

static size_t words_of(const conversion *on, char numbers[NUMBERS][NUMBER_ROOM], const char **words) {
  const struct {
    const char *name, *value;
  } named[] = {{"--as", on->kind}, {"--model", on->model}, {"--config", on->config}};
  const struct {
    const char *name;
    int64_t value;
  } counted[NUMBERS] = {{"--shard-bytes", on->shard_bytes}, {"--ranks", on->ranks}, {"--zero-stage", on->zero_stage}};
  size_t at = 0;
  for (size_t i = 0; i < NUMBERS; i++) {
    if (counted[i].value > 0) {
      (void)snprintf(numbers[i], NUMBER_ROOM, "%" PRId64, counted[i].value);
      words[at++] = counted[i].name;
      words[at++] = numbers[i];
    }
  }
  for (size_t i = 0; i < sizeof named / sizeof named[0]; i++) {
    if (named[i].value != NULL) {
      words[at++] = named[i].name;
      words[at++] = named[i].value;
    }
  }
  if (on->force) {
    words[at++] = "--force";
  }
  if (on->weights_only) {
    words[at++] = "--weights-only";
  }
  words[at++] = "--"; /* a path may begin with a dash */
  words[at++] = on->input;
  words[at++] = on->output;
  return at;
}

static int run(const conversion *on) {
  const char *words[EVEN_CKPT_PYTHON_MOST_WORDS];
  char numbers[NUMBERS][NUMBER_ROOM];
  size_t count = words_of(on, numbers, words);
  return even_ckpt_python(on->python, "evenstep.ckpt_convert", words, count, on->json);
}

enum { COMMON = 9, MOST_RANKS = 65536 };

static void declare(conversion *on, even_option *out) {
  const even_option options[COMMON] = {
      {0, "as", EVEN_OPTION_TEXT, &on->kind, "FORMAT", "the format to write, where its name does not say", 0, 0},
      {0, "force", EVEN_OPTION_FLAG, &on->force, NULL, "replace a file, or a checkpoint's folder, that is there", 0, 0},
      {0, "model", EVEN_OPTION_TEXT, &on->model, "NAME", "of several models: which (default model)", 0, 0},
      {0, "config", EVEN_OPTION_TEXT, &on->config, "FILE", "a config.json to put into a Hugging Face folder", 0, 0},
      {0, "shard-bytes", EVEN_OPTION_INTEGER, &on->shard_bytes, "N",
       "most bytes in one file of a Hugging Face folder (default 5000000000)", 1, INT64_MAX},
      {0, "ranks", EVEN_OPTION_INTEGER, &on->ranks, "N", "of --as deepspeed: for how many ranks (default 1)", 1,
       MOST_RANKS},
      {0, "zero-stage", EVEN_OPTION_INTEGER, &on->zero_stage, "N", "of --as deepspeed: 1, 2 or 3 (default 2)", 1, 3},
      {0, "python", EVEN_OPTION_TEXT, &on->python, "PATH", "the interpreter that has torch and evenstep", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &on->json, NULL, "print what was done as JSON", 0, 0},
  };
  memcpy(out, options, sizeof options);
}

int even_cli_ckpt_convert(int argc, char **argv) {
  conversion on = {.shard_bytes = INT64_C(5000000000)};
  even_option options[COMMON];
  int operand = 0;
  int code = 0;
  declare(&on, options);
  if (!even_cli_begin(&convert_usage, options, COMMON, argc, argv, 2, "evenstep ckpt convert [options] IN OUT",
                      &operand, &code)) {
    return code;
  }
  if (argc - operand != 2) {
    (void)even_fail(EVEN_ERR_USAGE, "ckpt convert: what, and where to?");
    (void)even_error_fix("evenstep ckpt convert [options] IN OUT");
    return even_cli_fail();
  }
  on.input = argv[operand];
  on.output = argv[operand + 1];
  return run(&on);
}

int even_cli_ckpt_export(int argc, char **argv) {
  conversion on = {.shard_bytes = INT64_C(5000000000), .weights_only = true};
  even_option options[COMMON + 1];
  int operand = 0;
  int code = 0;
  options[0] = (even_option){0, "to", EVEN_OPTION_TEXT, &on.output, "OUT", "where to", 0, 0};
  declare(&on, options + 1);
  if (!even_cli_begin(&export_usage, options, COMMON + 1, argc, argv, 1, "evenstep ckpt export PATH --to OUT", &operand,
                      &code)) {
    return code;
  }
  if (argc - operand != 1 || on.output == NULL) {
    (void)even_fail(EVEN_ERR_USAGE, "ckpt export: %s", on.output == NULL ? "where to? (--to)" : "of what?");
    (void)even_error_fix("evenstep ckpt export PATH --to OUT");
    return even_cli_fail();
  }
  on.input = argv[operand];
  return run(&on);
}
