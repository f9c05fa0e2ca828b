package dev.moorage;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonPrimitive;
import com.google.rpc.BadRequest;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.Set;

/** Compares an answer with what a case of the conformance table expects. */
final class Comparison {
    private static final Set<JsonElement> DEFAULTS =
            Set.of(new JsonPrimitive(false), new JsonPrimitive(0), new JsonPrimitive("0"), new JsonPrimitive(""));

    private final List<String> problems = new ArrayList<>();

    private Comparison() {}

    /** What is not as expected. */
    static List<String> problems(JsonObject expected, Optional<Failure> failure, JsonObject response) {
        Comparison comparison = new Comparison();
        comparison.compareFailure(expected, failure);
        if (expected.has("response")) {
            comparison.compare("response", expected.get("response"), response);
        }
        comparison.comparePaths(expected, response);
        if (!comparison.problems.isEmpty()) {
            comparison.problems.add("answer: " + failure.map(Failure::toString).orElseGet(response::toString));
        }
        return comparison.problems;
    }

    /** The value at a path such as "sessions.0.lease.token", null where there is none. */
    static JsonElement at(JsonElement value, String path) {
        for (String name : path.split("\\.")) {
            if (value != null && value.isJsonArray()) {
                int index = Integer.parseInt(name);
                value = index < value.getAsJsonArray().size() ? value.getAsJsonArray().get(index) : null;
            } else {
                value = value != null && value.isJsonObject() ? value.getAsJsonObject().get(name) : null;
            }
        }
        return value;
    }

    private void compareFailure(JsonObject expected, Optional<Failure> failure) {
        String wanted = expected.has("code") ? expected.get("code").getAsString() : "OK";
        String code = failure.map(found -> found.code().name()).orElse("OK");
        require(code.equals(wanted), "code is " + code + ", not " + wanted);
        if (expected.has("reason")) {
            Optional<String> reason = failure.flatMap(Failure::reason);
            String wantedReason = expected.get("reason").getAsString();
            require(reason.equals(Optional.of(wantedReason)), "reason is " + reason + ", not " + wantedReason);
        }
        if (expected.has("field")) {
            List<String> fields = failure.map(Failure::fieldViolations).orElse(List.of()).stream()
                    .map(BadRequest.FieldViolation::getField).toList();
            String field = expected.get("field").getAsString();
            require(fields.contains(field), field + " is not among the violated fields " + fields);
        }
        if (expected.has("retry_info")) {
            Duration delay = failure.flatMap(Failure::retryAfter).orElse(Duration.ZERO);
            require(delay.compareTo(Duration.ZERO) > 0, "no RetryInfo with a delay");
        }
    }

    private void comparePaths(JsonObject expected, JsonObject response) {
        if (expected.has("present")) {
            expected.getAsJsonArray("present").forEach(path ->
                    require(at(response, path.getAsString()) != null, path + " is missing"));
        }
        if (expected.has("absent")) {
            expected.getAsJsonArray("absent").forEach(path ->
                    require(at(response, path.getAsString()) == null, path + " is there"));
        }
    }

    private void compare(String path, JsonElement wanted, JsonElement actual) {
        if (wanted.isJsonObject() && actual != null && actual.isJsonObject()) {
            wanted.getAsJsonObject().asMap().forEach((key, value) ->
                    compare(path + "." + key, value, actual.getAsJsonObject().get(key)));
        } else if (wanted.isJsonArray() && actual != null && actual.isJsonArray()
                && wanted.getAsJsonArray().size() == actual.getAsJsonArray().size()) {
            for (int index = 0; index < wanted.getAsJsonArray().size(); index++) {
                compare(path + "." + index, wanted.getAsJsonArray().get(index), actual.getAsJsonArray().get(index));
            }
        } else {
            boolean isDefault = actual == null && DEFAULTS.contains(wanted);
            require(wanted.equals(actual) || isDefault, path + " is " + actual + ", not " + wanted);
        }
    }

    private void require(boolean holds, String problem) {
        if (!holds) {
            problems.add(problem);
        }
    }
}
