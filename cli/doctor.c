/* evenstep doctor: what is here, what is missing, what that costs, how to get it. */
#include "cli/doctor.h"

#include "base/alloc.h"
#include "base/json_writer.h"
#include "cli/command.h"

#include <stdarg.h>
#include <string.h>

static const char *const state_words[] = {"ok", "note", "missing"};

void even_doctor_add(even_doctor *doctor, const char *name, even_doctor_state state, const char *cost, const char *fix,
                     const char *found, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, found);
  (void)vsnprintf(text, sizeof text, found, arguments);
  va_end(arguments);
  if (doctor->status == EVEN_OK) {
    doctor->status = even_realloc((void **)&doctor->items, doctor->count + 1, sizeof *doctor->items);
  }
  if (doctor->status != EVEN_OK) {
    return;
  }
  even_doctor_check *to = &doctor->items[doctor->count];
  *to = (even_doctor_check){.name = name,
                            .state = state,
                            .cost = state == EVEN_DOCTOR_OK ? NULL : cost,
                            .fix = state == EVEN_DOCTOR_OK ? NULL : fix};
  doctor->status = even_duplicate(text, &to->found);
  doctor->count += doctor->status == EVEN_OK ? 1 : 0;
}

static size_t missing_of(const even_doctor *doctor) {
  size_t missing = 0;
  for (size_t i = 0; i < doctor->count; i++) {
    missing += doctor->items[i].state == EVEN_DOCTOR_MISSING;
  }
  return missing;
}

static void check_print(const even_doctor_check *check, bool colour) {
  static const char *const marks[] = {"OK", "note", "MISSING"};
  static const char *const colours[] = {"\x1b[32m", "\x1b[33m", "\x1b[31m"};
  (void)printf("%s%-8s%s %-16s %s\n", colour ? colours[check->state] : "", marks[check->state], colour ? "\x1b[0m" : "",
               check->name, check->found);
  if (check->cost != NULL) {
    (void)printf("%-25s   costs: %s\n", "", check->cost);
  }
  if (check->fix != NULL) {
    (void)printf("%-25s   do: %s\n", "", check->fix);
  }
}

static void table_print(const even_doctor *doctor) {
  bool colour = even_cli_colour(stdout);
  size_t missing = missing_of(doctor);
  for (size_t i = 0; i < doctor->count; i++) {
    check_print(&doctor->items[i], colour);
  }
  if (missing == 0) {
    (void)printf("\nTraining can work on this host.\n");
  } else {
    (void)printf("\nTraining cannot work on this host yet: %zu part%s missing (marked MISSING).\n", missing,
                 missing == 1 ? " is" : "s are");
  }
}

static even_status json_print(const even_doctor *doctor) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 2);
  even_json_object(&json, NULL);
  even_json_string(&json, "format", "evenstep-doctor-1");
  even_json_bool(&json, "can_train", missing_of(doctor) == 0);
  even_json_array(&json, "checks");
  for (size_t i = 0; i < doctor->count; i++) {
    const even_doctor_check *check = &doctor->items[i];
    even_json_object(&json, NULL);
    even_json_string(&json, "name", check->name);
    even_json_string(&json, "state", state_words[check->state]);
    even_json_string(&json, "found", check->found);
    even_json_string(&json, "cost", check->cost);
    even_json_string(&json, "fix", check->fix);
    even_json_object_end(&json);
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
  even_status status = even_text_status(&text);
  if (status == EVEN_OK) {
    (void)puts(even_text_string(&text));
  }
  even_text_free(&text);
  return status;
}

static void doctor_free(even_doctor *doctor) {
  for (size_t i = 0; i < doctor->count; i++) {
    even_free(doctor->items[i].found);
  }
  even_free(doctor->items);
}

static int examine(const char *python, bool json) {
  even_doctor doctor = {0};
  even_doctor_python(&doctor, python);
  even_doctor_host(&doctor);
  even_doctor_libraries(&doctor);
  even_status status = doctor.status;
  if (status == EVEN_OK && json) {
    status = json_print(&doctor);
  } else if (status == EVEN_OK) {
    table_print(&doctor);
  }
  int code = status != EVEN_OK         ? even_cli_fail_of(status)
             : missing_of(&doctor) > 0 ? even_status_exit_code(EVEN_ERR_UNSUPPORTED)
                                       : 0;
  doctor_free(&doctor);
  return code;
}

int even_cli_doctor(int argc, char **argv) {
  bool json = false;
  const char *python = NULL;
  const even_option options[] = {
      {0, "python", EVEN_OPTION_TEXT, &python, "PATH", "the interpreter to look at (default: as for run)", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &json, NULL, "print JSON", 0, 0},
  };
  const even_usage usage = {
      .command = "doctor",
      .synopsis = "evenstep doctor [--json] [--python PATH]",
      .description =
          "Looks at everything that Evenstep needs or can use on this host: what was found, what is missing,\n"
          "what each missing part costs, how to get it.",
      .epilogue = "Exit code: 0 when training can work on this host, 8 when a part that it needs is missing."};
  int operand = 0;
  int code = 0;
  if (!even_cli_begin(&usage, options, sizeof options / sizeof options[0], argc, argv, 0, NULL, &operand, &code)) {
    return code;
  }
  return examine(python, json);
}
