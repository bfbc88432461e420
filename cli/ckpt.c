/* evenstep ckpt ls | verify | show, and the way to its other commands (cli/ckpt.h). */
#include "cli/ckpt.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_writer.h"
#include "base/nearest.h"
#include "base/utf8.h"
#include "checkpoint/reader.h"
#include "cli/ckpt_python.h"
#include "cli/command.h"
#include "cli/units.h"
#include "os/path.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct listing {
  even_json json;
  bool as_json;
  size_t count;
  bool header_printed;
} listing;

enum { MOST_SHOWN = 1024, MOST_PATH = 4096 };

static void number_text(int64_t value, char *out, size_t room) {
  if (value < 0) {
    (void)snprintf(out, room, "-");
  } else {
    (void)snprintf(out, room, "%" PRId64, value);
  }
}

static void number_or_null(even_json *json, const char *key, int64_t value) {
  if (value < 0) {
    even_json_null(json, key);
  } else {
    even_json_integer(json, key, value);
  }
}

static void list_one_json(even_json *json, const char *path, const even_checkpoint_info *info, const char *problem) {
  even_json_object(json, NULL);
  even_json_string(json, "path", path);
  number_or_null(json, "step", info->step);
  number_or_null(json, "epoch", info->epoch);
  even_json_string(json, "created", info->created);
  even_json_unsigned(json, "bytes", info->bytes);
  number_or_null(json, "world_size", info->world_size);
  even_json_bool(json, "whole", problem == NULL);
  even_json_string(json, "problem", problem);
  even_json_object_end(json);
}

static void list_one_text(listing *out, const char *path, const even_checkpoint_info *info, const char *problem) {
  char step[24];
  char epoch[24];
  char ranks[24];
  char size[24];
  char when[24] = "-";
  char shown[MOST_SHOWN];
  if (!out->header_printed) {
    (void)printf("%10s  %6s  %-19s  %10s  %5s  %-7s  %s\n", "step", "epoch", "written (UTC)", "size", "ranks", "whole",
                 "folder");
    out->header_printed = true;
  }
  number_text(info->step, step, sizeof step);
  number_text(info->epoch, epoch, sizeof epoch);
  number_text(info->world_size, ranks, sizeof ranks);
  (void)even_cli_bytes(info->bytes, size, sizeof size);
  if (info->created != NULL) {
    (void)even_utf8_clean(info->created, when, 20);
    char *middle = strchr(when, 'T');
    if (middle != NULL) {
      *middle = ' ';
    }
  }
  (void)printf("%10s  %6s  %-19s  %10s  %5s  %-7s  %s\n", step, epoch, when, size, ranks,
               problem == NULL ? "yes" : "NO", even_utf8_clean(path, shown, sizeof shown));
  if (problem != NULL) {
    (void)printf("%12s%s\n", "", even_utf8_clean(problem, shown, sizeof shown));
  }
}

static void list_one(listing *out, const char *path) {
  even_checkpoint_info info = {.step = -1, .epoch = -1, .world_size = -1};
  char problem[sizeof even_error_last()->what] = "";
  bool whole = false;
  if (even_ends_with(path, EVEN_CHECKPOINT_PARTIAL)) {
    (void)snprintf(problem, sizeof problem,
                   "unfinished: it is being written, or its writer died (the next save "
                   "removes it then)");
  } else {
    whole = even_checkpoint_inspect(path, &info) == EVEN_OK;
    if (!whole) {
      (void)snprintf(problem, sizeof problem, "%s", even_error_last()->what);
    }
  }
  if (out->as_json) {
    list_one_json(&out->json, path, &info, whole ? NULL : problem);
  } else {
    list_one_text(out, path, &info, whole ? NULL : problem);
  }
  out->count++;
  even_checkpoint_info_free(&info);
}

static even_status list_folder(listing *out, const char *folder) {
  even_names paths = {NULL, 0};
  even_status status = even_ckpt_paths(folder, true, &paths);
  for (size_t i = 0; i < paths.count && status == EVEN_OK; i++) {
    list_one(out, paths.items[i]);
  }
  even_names_free(&paths);
  return status;
}

/* Without an argument: ./checkpoints, else those of every run in ./runs. */
static even_status list_default(listing *out) {
  even_names runs = {NULL, 0};
  even_text path = EVEN_TEXT_EMPTY;
  if (even_path_exists("checkpoints")) {
    return list_folder(out, "checkpoints");
  }
  even_status status = even_folder_names("runs", &runs);
  if (status == EVEN_ERR_NOT_FOUND) {
    status = even_fail(EVEN_ERR_NOT_FOUND, "there is no folder checkpoints or runs here");
    (void)even_error_fix("name the folder: `evenstep ckpt ls DIR`");
  }
  for (size_t i = 0; i < runs.count && status == EVEN_OK; i++) {
    even_text_clear(&path);
    even_text_format(&path, "runs/%s/checkpoints", runs.items[i]);
    status = even_text_status(&path);
    if (status == EVEN_OK && even_path_exists(even_text_string(&path))) {
      status = list_folder(out, even_text_string(&path));
    }
  }
  even_names_free(&runs);
  even_text_free(&path);
  return status;
}

static even_status list_named(listing *out, const char *name) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_status status = even_ckpt_folder(name, &folder);
  if (status == EVEN_OK) {
    status = list_folder(out, even_text_string(&folder));
  }
  even_text_free(&folder);
  return status;
}

static int finish_json(even_text *text, even_status status) {
  if (status == EVEN_OK) {
    status = even_text_status(text);
  }
  if (status == EVEN_OK) {
    (void)printf("%s\n", even_text_string(text));
  }
  even_text_free(text);
  return status == EVEN_OK ? 0 : even_cli_fail();
}

static int list(int argc, char **argv) {
  bool as_json = false;
  int code = 0;
  int operand = 0;
  const even_usage usage = {
      .command = "ckpt ls",
      .synopsis = "evenstep ckpt ls [options] [DIR|RUN …|URL]",
      .description =
          "Lists checkpoints: of a folder, a run folder, a run's name, or of a URL (s3://bucket/run), alone; without "
          "one those of ./checkpoints or of all ./runs. \"whole\" compares sizes only; `evenstep ckpt verify` reads "
          "every byte."};
  const even_option options[] = {{.name = "json", .kind = EVEN_OPTION_FLAG, .value = &as_json, .help = "print JSON"}};
  if (!even_cli_begin(&usage, options, 1, argc, argv, -1, NULL, &operand, &code)) {
    return code;
  }
  if (argc - operand == 1 && even_path_is_url(argv[operand])) {
    const char *words[] = {"ls", argv[operand]};
    return even_ckpt_python(NULL, "evenstep.checkpoint_remote", words, 2, as_json);
  }
  even_text text = EVEN_TEXT_EMPTY;
  listing out = {.json = even_json_begin(&text, 2), .as_json = as_json};
  even_json_array(&out.json, NULL);
  even_status status = operand == argc ? list_default(&out) : EVEN_OK;
  for (int i = operand; i < argc && status == EVEN_OK; i++) {
    status = list_named(&out, argv[i]);
  }
  even_json_array_end(&out.json);
  if (as_json) {
    return finish_json(&text, status);
  }
  even_text_free(&text);
  if (status != EVEN_OK) {
    return even_cli_fail();
  }
  if (out.count == 0) {
    (void)printf("no checkpoints there\n");
  }
  return 0;
}

static void verify_json(even_json *json, const char *path, even_status status, const even_names *problems) {
  even_json_object(json, NULL);
  even_json_string(json, "path", path);
  even_json_bool(json, "whole", status == EVEN_OK);
  even_json_array(json, "problems");
  for (size_t i = 0; i < problems->count; i++) {
    even_json_string(json, NULL, problems->items[i]);
  }
  if (status != EVEN_OK && problems->count == 0) {
    even_json_string(json, NULL, even_error_last()->what);
  }
  even_json_array_end(json);
  even_json_object_end(json);
}

static void verify_text(const char *path, even_status status, const even_names *problems) {
  char shown[MOST_PATH];
  if (status == EVEN_OK) {
    (void)printf("%s: whole\n", even_utf8_clean(path, shown, sizeof shown));
    return;
  }
  if (status == EVEN_ERR_CORRUPT) {
    (void)printf("%s: DAMAGED\n", even_utf8_clean(path, shown, sizeof shown));
    for (size_t i = 0; i < problems->count; i++) {
      (void)printf("  %s\n", even_utf8_clean(problems->items[i], shown, sizeof shown));
    }
    return;
  }
  (void)even_cli_fail();
}

typedef struct verifying {
  even_json json;
  bool as_json;
  int worst; /* of the exit codes */
} verifying;

static void take_outcome(void *context, const char *path, even_status status, const even_names *problems) {
  verifying *out = context;
  int code = even_status_exit_code(status);
  out->worst = code > out->worst ? code : out->worst;
  if (out->as_json) {
    verify_json(&out->json, path, status, problems);
  } else {
    verify_text(path, status, problems);
  }
}

static int verify(int argc, char **argv) {
  bool as_json = false;
  int code = 0;
  int operand = 0;
  const even_usage usage = {
      .command = "ckpt verify",
      .synopsis = "evenstep ckpt verify [options] PATH|RUN …|URL …",
      .description =
          "Reads every byte of the checkpoints and compares the checksums: of one, of all in a "
          "folder or of a run; of URLs a piece at a time, there.",
      .epilogue = "exit code: 0 all are whole, 6 one is damaged, 3 one is not there or has lost its manifest"};
  const even_option options[] = {{.name = "json", .kind = EVEN_OPTION_FLAG, .value = &as_json, .help = "print JSON"}};
  if (!even_cli_begin(&usage, options, 1, argc, argv, -1, NULL, &operand, &code)) {
    return code;
  }
  if (operand == argc) {
    (void)even_fail(EVEN_ERR_USAGE, "ckpt verify: no checkpoint named");
    (void)even_error_fix("`evenstep ckpt ls` lists them");
    return even_cli_fail();
  }
  even_text text = EVEN_TEXT_EMPTY;
  verifying out = {.json = even_json_begin(&text, 2), .as_json = as_json};
  even_json_array(&out.json, NULL);
  for (int i = operand; i < argc; i++) {
    even_ckpt_verify(argv[i], take_outcome, &out);
  }
  even_json_array_end(&out.json);
  if (!as_json) {
    even_text_free(&text);
    return out.worst;
  }
  int failed = finish_json(&text, EVEN_OK);
  return failed != 0 ? failed : out.worst;
}

static void show_tensor(even_json *json, bool as_json, const char *name, json_t *tensor) {
  even_text shape = EVEN_TEXT_EMPTY;
  json_t *dimensions = json_object_get(tensor, "shape");
  even_text_add(&shape, "[");
  for (size_t i = 0; i < json_array_size(dimensions); i++) {
    even_text_format(&shape, "%s%" JSON_INTEGER_FORMAT, i == 0 ? "" : ",",
                     json_integer_value(json_array_get(dimensions, i)));
  }
  even_text_add(&shape, "]");
  const char *dtype = json_string_value(json_object_get(tensor, "dtype"));
  if (as_json) {
    even_json_object(json, NULL);
    even_json_string(json, "name", name);
    even_json_string(json, "dtype", dtype);
    even_json_raw(json, "shape", even_text_string(&shape));
    even_json_object_end(json);
  } else {
    char shown[MOST_SHOWN];
    (void)printf("    %-6s %-20s %s\n", dtype, even_text_string(&shape), even_utf8_clean(name, shown, sizeof shown));
  }
  even_text_free(&shape);
}

static even_status show_file(even_json *json, bool as_json, const char *folder,
                             const even_checkpoint_stored_file *file) {
  even_text path = EVEN_TEXT_EMPTY;
  json_t *header = NULL;
  const char *name = NULL;
  json_t *tensor = NULL;
  char size[24];
  even_text_format(&path, "%s/%s", folder, file->name);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK && even_ends_with(file->name, ".safetensors")) {
    status = even_safetensors_read_header(even_text_string(&path), &header);
  }
  even_text_free(&path);
  EVEN_TRY(status);
  (void)even_cli_bytes(file->bytes, size, sizeof size);
  if (as_json) {
    even_json_object(json, NULL);
    even_json_string(json, "name", file->name);
    even_json_unsigned(json, "bytes", file->bytes);
    even_json_array(json, "tensors");
  } else {
    char shown[MOST_SHOWN];
    (void)printf("  %s (%s)\n", even_utf8_clean(file->name, shown, sizeof shown), size);
  }
  json_object_foreach(header, name, tensor) {
    if (strcmp(name, "__metadata__") != 0) {
      show_tensor(json, as_json, name, tensor);
    }
  }
  if (as_json) {
    even_json_array_end(json);
    even_json_object_end(json);
  }
  json_decref(header);
  return EVEN_OK;
}

static even_status show_checkpoint(const char *path, bool as_json) {
  even_checkpoint_info info;
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 2);
  even_status status = even_checkpoint_inspect(path, &info);
  if (status != EVEN_OK) {
    even_checkpoint_info_free(&info);
    return status;
  }
  char *state = json_dumps(info.state, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
  even_json_object(&json, NULL);
  even_json_string(&json, "path", path);
  even_json_string(&json, "created", info.created);
  if (!as_json) {
    char created[64];
    (void)printf("%s\n  written %s, step %" PRId64 ", epoch %" PRId64 ", %" PRId64 " ranks\n", path,
                 even_utf8_clean(info.created, created, sizeof created), info.step, info.epoch, info.world_size);
  }
  even_json_array(&json, "files");
  for (size_t i = 0; i < info.file_count && status == EVEN_OK; i++) {
    status = show_file(&json, as_json, path, &info.files[i]);
  }
  even_json_array_end(&json);
  even_json_raw(&json, "state", state == NULL ? "null" : state);
  even_json_object_end(&json);
  if (status == EVEN_OK && as_json) {
    status = even_text_status(&text);
    if (status == EVEN_OK) {
      (void)printf("%s\n", even_text_string(&text));
    }
  }
  free(state);
  even_text_free(&text);
  even_checkpoint_info_free(&info);
  return status;
}

static int show(int argc, char **argv) {
  bool as_json = false;
  int code = 0;
  int operand = 0;
  const even_usage usage = {.command = "ckpt show",
                            .synopsis = "evenstep ckpt show [options] PATH|URL",
                            .description =
                                "Shows what a checkpoint holds: its files, their tensors, with --json the "
                                "whole state (step, cursors, optimizer settings), too."};
  const even_option options[] = {{.name = "json", .kind = EVEN_OPTION_FLAG, .value = &as_json, .help = "print JSON"}};
  if (!even_cli_begin(&usage, options, 1, argc, argv, -1, NULL, &operand, &code)) {
    return code;
  }
  if (argc - operand != 1) {
    (void)even_fail(EVEN_ERR_USAGE, "ckpt show: name one checkpoint");
    (void)even_error_fix("`evenstep ckpt ls` lists them");
    return even_cli_fail();
  }
  return show_checkpoint(argv[operand], as_json) == EVEN_OK ? 0 : even_cli_fail();
}

/* Whether a word is a URL, or --OPTION=URL before "--": the rule of evenstep.checkpoint_elsewhere, too. Commands that
 * know URLs themselves have none. */
static bool is_elsewhere(const even_command *command, int argc, char **argv) {
  bool knows =
      strcmp(command->name, "ls") == 0 || strcmp(command->name, "push") == 0 || strcmp(command->name, "fetch") == 0;
  bool ended = false;
  for (int i = 0; i < argc && !knows; i++) {
    const char *value = !ended && strncmp(argv[i], "--", 2) == 0 ? strchr(argv[i], '=') : NULL;
    if (even_path_is_url(argv[i]) || (value != NULL && even_path_is_url(value + 1))) {
      return true;
    }
    ended = ended || strcmp(argv[i], "--") == 0;
  }
  return false;
}

static int start(const even_command *command, int argc, char **argv) {
  if (!is_elsewhere(command, argc - 1, argv + 1)) {
    return command->run(argc - 1, argv + 1);
  }
  if (getenv("EVENSTEP_CKPT_BESIDE_URLS") == NULL) {
    return even_ckpt_elsewhere(argc, argv);
  }
  /* evenstep.checkpoint_elsewhere started this, with paths in place of all URLs: it would do so without end */
  (void)even_fail(EVEN_ERR_USAGE, "ckpt %s takes no URL there", command->name);
  (void)even_error_fix("name a file of this host");
  return even_cli_fail();
}

int even_cli_ckpt(int argc, char **argv) {
  static const even_command commands[] = {
      {"ls", "lists the checkpoints of a folder or run", list},
      {"verify", "reads every byte and compares the checksums", verify},
      {"show", "shows files, tensors and state of one", show},
      {"repair", "puts right what is damaged, by a copy", even_cli_ckpt_repair},
      {"diff", "compares the tensors and settings of two", even_cli_ckpt_diff},
      {"convert", "writes one in another format", even_cli_ckpt_convert},
      {"export", "writes the weights of one for other tools", even_cli_ckpt_export},
      {"reshard", "writes the same tensors into other files", even_cli_ckpt_reshard},
      {"push", "uploads one to another place (s3://…)", even_cli_ckpt_push},
      {"fetch", "brings the newest back from there", even_cli_ckpt_fetch}};
  enum { COMMANDS = sizeof commands / sizeof commands[0] };
  const char *names[COMMANDS];
  bool help = argc >= 1 && (strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0);
  if (argc < 1 || help) {
    FILE *stream = help ? stdout : stderr;
    (void)fprintf(stream, "usage: evenstep ckpt COMMAND [options]\n\n");
    for (size_t i = 0; i < COMMANDS; i++) {
      (void)fprintf(stream, "  %-8s %s\n", commands[i].name, commands[i].summary);
    }
    (void)fprintf(stream,
                  "\nWhere a command takes a path a URL (s3://bucket/run/step-00000120) may stand, too.\n"
                  "`evenstep ckpt COMMAND --help` tells more of each.\n");
    return help ? 0 : even_status_exit_code(EVEN_ERR_USAGE);
  }
  for (size_t i = 0; i < COMMANDS; i++) {
    names[i] = commands[i].name;
    if (strcmp(argv[0], commands[i].name) == 0) {
      return start(&commands[i], argc, argv);
    }
  }
  (void)even_fail(EVEN_ERR_USAGE, "ckpt: unknown command \"%s\"", argv[0]);
  const char *nearest = even_nearest(argv[0], names, COMMANDS);
  (void)even_error_fix("did you mean `evenstep ckpt %s`? `evenstep ckpt --help` lists the commands",
                       nearest == NULL ? "ls" : nearest);
  return even_cli_fail();
}
