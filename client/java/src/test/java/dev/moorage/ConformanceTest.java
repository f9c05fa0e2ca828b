package dev.moorage;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.gson.JsonPrimitive;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import dev.moorage.v1.InspectorServiceGrpc;
import dev.moorage.v1.OperatorServiceGrpc;
import dev.moorage.v1.SchedulerServiceGrpc;
import io.grpc.CallOptions;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.ClientCalls;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.DynamicTest;
import org.junit.jupiter.api.TestFactory;

/** Plays proto/conformance/cases.json, which all languages play, against the server named by MOORAGE_SERVER. */
class ConformanceTest {
    private static final String SERVER = "MOORAGE_SERVER";
    private static final Map<String, ManagedChannel> CHANNELS = new HashMap<>();

    @TestFactory
    Stream<DynamicTest> conformance() throws IOException {
        assertNotNull(System.getenv(SERVER), SERVER + " names no server");
        Path path = Path.of(System.getenv().getOrDefault("MOORAGE_CONFORMANCE", "../../proto/conformance/cases.json"));
        return JsonParser.parseString(Files.readString(path)).getAsJsonArray().asList().stream()
                .map(JsonElement::getAsJsonObject)
                .filter(found -> System.getenv(server(found)) != null)
                .map(found -> DynamicTest.dynamicTest(
                        found.get("name").getAsString(), () -> new Player(channel(server(found))).play(found)));
    }

    @AfterAll
    static void close() {
        CHANNELS.values().forEach(ManagedChannel::shutdownNow);
    }

    private static String server(JsonObject found) {
        return found.has("server") ? found.get("server").getAsString() : SERVER;
    }

    /** Without retries, so that a case sees every failure. */
    private static ManagedChannel channel(String server) {
        return CHANNELS.computeIfAbsent(server, name ->
                Channels.newBuilder(System.getenv(name), InsecureChannelCredentials.create()).disableRetry().build());
    }

    /** What came back: a failure, or else the response. */
    private record Answer(Optional<Failure> failure, JsonObject response) {}

    /** Plays one case. */
    private static final class Player {
        private static final Pattern VARIABLE = Pattern.compile("\\$\\{(\\w+)}");
        private static final long PAUSE_MS = 100;

        private final ManagedChannel channel;
        private final Map<String, String> variables = new HashMap<>();

        Player(ManagedChannel channel) {
            this.channel = channel;
            variables.put("pool", "conformance-" + UUID.randomUUID());
        }

        void play(JsonObject played) throws Exception {
            int number = 0;
            for (JsonElement step : played.getAsJsonArray("steps")) {
                number++;
                List<String> problems = step(step.getAsJsonObject());
                String where = played.get("name") + ", step " + number + ", " + step.getAsJsonObject().get("call");
                assertEquals(List.of(), problems, where);
            }
        }

        private List<String> step(JsonObject step) throws Exception {
            double within = step.has("within") ? step.get("within").getAsDouble() : 0;
            long until = System.nanoTime() + (long) (within * 1e9);
            while (true) {
                Answer answer = call(step.get("call").getAsString(), filled(step.get("request")));
                JsonElement expected = filled(step.has("expect") ? step.get("expect") : new JsonObject());
                List<String> problems =
                        Comparison.problems(expected.getAsJsonObject(), answer.failure(), answer.response());
                if (problems.isEmpty() && step.has("save")) {
                    step.getAsJsonObject("save").asMap().forEach((name, path) ->
                            variables.put(name, Comparison.at(answer.response(), path.getAsString()).getAsString()));
                }
                if (problems.isEmpty() || System.nanoTime() - until >= 0) {
                    return problems;
                }
                Thread.sleep(PAUSE_MS);
            }
        }

        private Answer call(String call, JsonElement request) throws IOException {
            MethodDescriptor<Message, Message> method = method("moorage.v1." + call);
            var marshaller = (MethodDescriptor.PrototypeMarshaller<Message>) method.getRequestMarshaller();
            Message.Builder builder = marshaller.getMessagePrototype().newBuilderForType();
            JsonFormat.parser().merge(request.toString(), builder);
            CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(30, TimeUnit.SECONDS);
            try {
                Message answer = ClientCalls.blockingUnaryCall(channel, method, options, builder.build());
                String json = JsonFormat.printer().print(answer);
                return new Answer(Optional.empty(), JsonParser.parseString(json).getAsJsonObject());
            } catch (StatusRuntimeException error) {
                return new Answer(Optional.of(Failure.of(error)), new JsonObject());
            }
        }

        @SuppressWarnings("unchecked")
        private static MethodDescriptor<Message, Message> method(String name) {
            return (MethodDescriptor<Message, Message>) Stream.of(
                            SchedulerServiceGrpc.getServiceDescriptor(),
                            InspectorServiceGrpc.getServiceDescriptor(),
                            OperatorServiceGrpc.getServiceDescriptor())
                    .flatMap(service -> service.getMethods().stream())
                    .filter(found -> found.getFullMethodName().equals(name))
                    .findFirst()
                    .orElseThrow(() -> new IllegalArgumentException(name + " is no method"));
        }

        /** The value with all variables replaced. */
        private JsonElement filled(JsonElement value) {
            if (value.isJsonArray()) {
                JsonArray items = new JsonArray();
                value.getAsJsonArray().forEach(item -> items.add(filled(item)));
                return items;
            }
            if (value.isJsonObject()) {
                JsonObject object = new JsonObject();
                value.getAsJsonObject().asMap().forEach((key, child) -> object.add(key, filled(child)));
                return object;
            }
            if (value.isJsonPrimitive() && value.getAsJsonPrimitive().isString()) {
                return new JsonPrimitive(VARIABLE.matcher(value.getAsString())
                        .replaceAll(found -> Matcher.quoteReplacement(variable(found.group(1)))));
            }
            return value;
        }

        private String variable(String name) {
            if (name.equals("uuid")) {
                return UUID.randomUUID().toString();
            }
            if (name.startsWith("uuid_")) {
                return variables.computeIfAbsent(name, unused -> UUID.randomUUID().toString());
            }
            return Optional.ofNullable(variables.get(name))
                    .orElseThrow(() -> new AssertionError("nothing was saved as " + name));
        }
    }
}
